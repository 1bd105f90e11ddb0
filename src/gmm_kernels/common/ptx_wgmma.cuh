/* One wrapper for each wgmma instruction and shape. */
GMM__DEVICE void gmm_wgmma_fence(void) { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }
GMM__DEVICE void gmm_wgmma_commit(void) { asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory"); }
#define GMM__WGMMA_WAIT(groups) asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(groups) : "memory")

/* Shapes of wgmma with operands in shared memory: X(N / 8, tag of the accumulator operand list, N, asm operands of
   descriptor A, descriptor B and scale_d). Each thread holds N / 2 accumulators. Odd multiples of 8 are listed for
   the tile heights whose padding would cost most. */
#define GMM__T1 "%0,%1,%2,%3,%4,%5,%6,%7"
#define GMM__T2 GMM__T1 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define GMM__T3 GMM__T2 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define GMM__T4 GMM__T3 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define GMM__T5 GMM__T4 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define GMM__T6 GMM__T5 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define GMM__T7 GMM__T6 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define GMM__T8 GMM__T7 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define GMM__T9 GMM__T8 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define GMM__T10 GMM__T9 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define GMM__T11 GMM__T10 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define GMM__T12 GMM__T11 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define GMM__T13 GMM__T12 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define GMM__T14 GMM__T13 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define GMM__T15 GMM__T14 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define GMM__T16 GMM__T15 ",%120,%121,%122,%123,%124,%125,%126,%127"
#define GMM__T8h GMM__T8 ",%64,%65,%66,%67"
#define GMM__T9h GMM__T9 ",%72,%73,%74,%75"
#define GMM__T10h GMM__T10 ",%80,%81,%82,%83"
#define GMM__V1 GMM__V(0)
#define GMM__V2 GMM__V1, GMM__V(8)
#define GMM__V3 GMM__V2, GMM__V(16)
#define GMM__V4 GMM__V3, GMM__V(24)
#define GMM__V5 GMM__V4, GMM__V(32)
#define GMM__V6 GMM__V5, GMM__V(40)
#define GMM__V7 GMM__V6, GMM__V(48)
#define GMM__V8 GMM__V7, GMM__V(56)
#define GMM__V9 GMM__V8, GMM__V(64)
#define GMM__V10 GMM__V9, GMM__V(72)
#define GMM__V11 GMM__V10, GMM__V(80)
#define GMM__V12 GMM__V11, GMM__V(88)
#define GMM__V13 GMM__V12, GMM__V(96)
#define GMM__V14 GMM__V13, GMM__V(104)
#define GMM__V15 GMM__V14, GMM__V(112)
#define GMM__V16 GMM__V15, GMM__V(120)
#define GMM__V8h GMM__V8, GMM__H(64)
#define GMM__V9h GMM__V9, GMM__H(72)
#define GMM__V10h GMM__V10, GMM__H(80)
#define GMM_WGMMA_LIST(X) \
    X(2, 1, "16", "%8", "%9", "%10") \
    X(4, 2, "32", "%16", "%17", "%18") \
    X(6, 3, "48", "%24", "%25", "%26") \
    X(8, 4, "64", "%32", "%33", "%34") \
    X(10, 5, "80", "%40", "%41", "%42") \
    X(12, 6, "96", "%48", "%49", "%50") \
    X(14, 7, "112", "%56", "%57", "%58") \
    X(16, 8, "128", "%64", "%65", "%66") \
    X(17, 8h, "136", "%68", "%69", "%70") \
    X(18, 9, "144", "%72", "%73", "%74") \
    X(19, 9h, "152", "%76", "%77", "%78") \
    X(20, 10, "160", "%80", "%81", "%82") \
    X(21, 10h, "168", "%84", "%85", "%86") \
    X(22, 11, "176", "%88", "%89", "%90") \
    X(24, 12, "192", "%96", "%97", "%98") \
    X(26, 13, "208", "%104", "%105", "%106") \
    X(28, 14, "224", "%112", "%113", "%114") \
    X(30, 15, "240", "%120", "%121", "%122") \
    X(32, 16, "256", "%128", "%129", "%130")

/* Shapes of wgmma with A in registers: X(N / 16, N, asm operands of A's four registers, of descriptor B and of
   scale_d). */
#define GMM_WGMMA_RS_LIST(X) \
    X(1, "16", "%8,%9,%10,%11", "%12", "%13") \
    X(2, "32", "%16,%17,%18,%19", "%20", "%21") \
    X(3, "48", "%24,%25,%26,%27", "%28", "%29") \
    X(4, "64", "%32,%33,%34,%35", "%36", "%37") \
    X(5, "80", "%40,%41,%42,%43", "%44", "%45") \
    X(6, "96", "%48,%49,%50,%51", "%52", "%53") \
    X(7, "112", "%56,%57,%58,%59", "%60", "%61") \
    X(8, "128", "%64,%65,%66,%67", "%68", "%69") \
    X(9, "144", "%72,%73,%74,%75", "%76", "%77") \
    X(10, "160", "%80,%81,%82,%83", "%84", "%85") \
    X(11, "176", "%88,%89,%90,%91", "%92", "%93") \
    X(12, "192", "%96,%97,%98,%99", "%100", "%101")

#define GMM__H(b) GMM__W(d[(b)]), GMM__W(d[(b) + 1]), GMM__W(d[(b) + 2]), GMM__W(d[(b) + 3])
#define GMM__V(b) GMM__H(b), GMM__H((b) + 4)
/* Accumulators are read and written, by set too: else ptxas gives them other registers in every stage of a loop. */
#define GMM__W(x) "+f"(x)

#define GMM__BODY GMM__BODY_WGMMA
#define GMM__WGMMA_SCALE_D(c) c
/* dtype, operation, shape and types of wgmma, major modes of A and B */
#define GMM__ROW (bf16, fwd, "k16.f32.bf16.bf16", ", 0, 0")
#include GMM_KERNELS_FILE
#define GMM__ROW (bf16, dgrad, "k16.f32.bf16.bf16", ", 1, 0")
#include GMM_KERNELS_FILE
#define GMM__ROW (bf16, wgrad, "k16.f32.bf16.bf16", ", 1, 1")
#include GMM_KERNELS_FILE
#define GMM__ROW (f16, fwd, "k16.f32.f16.f16", ", 0, 0")
#include GMM_KERNELS_FILE
#define GMM__ROW (f16, dgrad, "k16.f32.f16.f16", ", 1, 0")
#include GMM_KERNELS_FILE
#define GMM__ROW (f16, wgrad, "k16.f32.f16.f16", ", 1, 1")
#include GMM_KERNELS_FILE
#ifndef GMM_NO_QUANT
#define GMM__ROW (e4m3, add, "k32.f32.e4m3.e4m3", "")
#include GMM_KERNELS_FILE
#define GMM__ROW (e5m2, add, "k32.f32.e5m2.e4m3", "")
#include GMM_KERNELS_FILE
#endif

/* One wgmma of M = 64, N = 16 n16 and K = 16 with register-sourced A (RS): d = A B + d, or d = A B where `scale_d` is
   0. B is K-major. */
GMM__DEVICE void gmm_wgmma_rs_bf16(const int n16, float *d, const uint32_t a_regs[4], uint64_t desc_b,
                                   const int scale_d = 1) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    switch (n16) {
#define GMM__X(u, n, regs, desc, c) \
    case u: asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, " c ", 0;\n wgmma.mma_async.sync.aligned.m64n" n \
                         "k16.f32.bf16.bf16 {" GMM__T##u "}, {" regs "}, " desc ", p, 1, 1, 0;\n}" \
                         : GMM__V##u : "r"(a_regs[0]), "r"(a_regs[1]), "r"(a_regs[2]), "r"(a_regs[3]), \
                         "l"(desc_b), "r"(scale_d)); break;
    GMM_WGMMA_RS_LIST(GMM__X)
#undef GMM__X
    default: break;
    }
#endif
}

#undef GMM__WGMMA_SCALE_D
#ifndef GMM_NO_QUANT
#define GMM__WGMMA_SCALE_D(c) "0"
/* dtype, operation, shape and types of wgmma, major modes of A and B */
#define GMM__ROW (e4m3, set, "k32.f32.e4m3.e4m3", "")
#include GMM_KERNELS_FILE
#define GMM__ROW (e5m2, set, "k32.f32.e5m2.e4m3", "")
#include GMM_KERNELS_FILE
#undef GMM__WGMMA_SCALE_D
#endif
#undef GMM__BODY

