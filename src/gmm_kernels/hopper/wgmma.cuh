/* Matrix descriptors of wgmma (PTX manual): in units of 16 bytes, bits 0 to 13 are the start address, bits 16 to 29 the
   leading dimension byte offset, bits 32 to 45 the stride dimension byte offset; 1 in bits 62 and 63 is the 128-byte
   swizzle. */
/* That of an operand's tile in boxes of 128-byte rows with 128-byte swizzle. K-major tiles are [mn][k]; MN-major tiles
   (`mn_major`) are boxes of [k][64 mn] one after another. 1024: 8 rows of 128 bytes; 8192: a box of 64 k by 64 mn. */
GMM__DEVICE uint64_t gmm_wgmma_desc(uint32_t smem, int mn_major) {
    return (uint64_t)1 << 62 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)(mn_major ? 8192 >> 4 : 1) << 16 |
           (smem & 0x3FFFF) >> 4;
}
/* That of a K-major tile, from the low word of its descriptor: the high word is the same for all of them. */
GMM__DEVICE uint64_t gmm_wgmma_desc_k_major(uint32_t address_word) {
    return (uint64_t)(1u << 30 | 1024 >> 4) << 32 | address_word;
}
/* That of a K-major operand without swizzle: blocks of 8 rows of 16 bytes. next_rows, next_k: bytes from a block to
   that of the next 8 rows, and to that of the next 16 bytes along K. */
GMM__DEVICE uint64_t gmm_wgmma_desc_blocks(uint32_t smem, uint32_t next_rows, uint32_t next_k) {
    return (uint64_t)(next_rows >> 4) << 32 | (uint64_t)(next_k >> 4) << 16 | (smem & 0x3FFFF) >> 4;
}
/* Which element of a warp group's product of wgmma (M = 64) is accumulator `u` of a thread in warp `warp` (0 to 3) of
   the warp group: its row, along M, and its column, along N. swap_ab exchanges them: the 16-bit Hopper products have
   columns of D along M and rows of D along N; the FP8 products have rows along M. */
GMM__DEVICE int gmm_wgmma_acc_m(int warp, int lane, int u) { return 16 * warp + lane / 4 + (u & 2 ? 8 : 0); }
GMM__DEVICE int gmm_wgmma_acc_n(int lane, int u) { return 8 * (u / 4) + lane % 4 * 2 + u % 2; }
/* The address that lane `lane` of warp `warp` passes to stmatrix.x4.trans for 16 rows of D, of which the warp has 16 of
   64 columns as accumulators (swap_ab). `to`: of the first row and of these 64 columns, in rows of row_bytes whose
   chunks of 16 bytes are swizzled as TMA with 128 bytes does. */
GMM__DEVICE uint32_t gmm_wgmma_stmatrix_at(uint32_t to, int row_bytes, int warp, int lane) {
    return to + (lane / 16 * 8 + lane % 8) * row_bytes + (((2 * warp + lane / 8 % 2) ^ (lane % 8)) << 4);
}
