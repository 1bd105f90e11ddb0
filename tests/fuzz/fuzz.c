/* fuzz.c - entry of libFuzzer; -DFUZZ=fuzz_header or -DFUZZ=fuzz_plan chooses the target. `make fuzz` builds both. */
#include "target.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    (void)FUZZ(data, size);
    return 0;
}
