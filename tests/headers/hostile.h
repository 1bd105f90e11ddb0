/* Names that other people's headers define. The gmm headers must compile after it, and leave these as they are. */
#define min(a, b) ((a) < (b) ? (a) : (b))
#define max(a, b) ((a) > (b) ? (a) : (b))
#define near
#define far
#define small char
#define interface struct
#define MIN(a, b) hostile
#define MAX(a, b) hostile
#define CHECK(x) hostile
#define ASSERT(x) hostile
#define CEIL_DIV(a, b) hostile
#define WARP_SIZE hostile
#define ALIGN(x) hostile
#define ERROR hostile
#define OK hostile
#define I hostile
#define X(a) hostile
