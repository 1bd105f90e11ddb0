/* fuzz.c - entry of libFuzzer; -DFUZZ=fuzz_header, fuzz_plan or fuzz_gtp chooses the target. `make fuzz` builds all. */
#include "gtp.h"
#include "target.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    (void)FUZZ(data, size);
    return 0;
}
