/* codes.c - writes the codes of all 65536 BF16 and all FP16 inputs, then the values of all codes, for ml_dtypes.py */
#define GMM_IMPLEMENTATION
#include "gmm_quant.h"

static void put(const void *data, size_t bytes) { (void)fwrite(data, 1, bytes, stdout); }

int main(void) {
    static const gmm_dtype dtypes[] = { GMM_E4M3, GMM_E5M2, GMM_E2M1 };
    uint32_t i, k, half;
    for (half = 0; half < 2; half++)
        for (i = 0; i < 0x10000u; i++) {
            const float v = half ? gmm_f16_to_f32((uint16_t)i) : gmm_bf16_to_f32((uint16_t)i);
            uint8_t code[6];
            for (k = 0; k < 3; k++) code[k] = gmm_encode_small(dtypes[k], v);
            code[3] = gmm_f32_to_e4m3_nosat(v);
            code[4] = gmm_f32_to_e5m2_nosat(v);
            code[5] = gmm_f32_to_e8m0(v);
            put(code, sizeof code);
        }
    for (k = 0; k < 4; k++)
        for (i = 0; i < 256; i++) {
            const uint8_t code = (uint8_t)(k == 2 ? i & 15u : i);
            const float v = k < 3 ? gmm_decode_small(dtypes[k], code) : gmm_e8m0_to_f32(code);
            put(&v, sizeof v);
        }
    return 0;
}
