/* Two copies of the library in one process must not mix. Arguments: the versions that the two plugins were built of. */
#include <stdlib.h>

unsigned plugin_a(void);
unsigned plugin_b(void);

int main(int argc, char **argv) {
    return argc != 3 || plugin_a() != (unsigned)atoi(argv[1]) || plugin_b() != (unsigned)atoi(argv[2]);
}
