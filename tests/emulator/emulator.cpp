/* emulator.cpp - see emulator.h: fibers, their scheduler, barriers, warp exchanges, TMA. */
#include "emulator.h"

#include <elf.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <vector_functions.h>
#ifndef __x86_64__
#include <ucontext.h>
#endif

#include <vector>

enum { MAX_CTA_THREADS = 1024, MAX_WARPS = MAX_CTA_THREADS / 32, STACK_BYTES = 256 * 1024, NAMED_BARRIERS = 16 };
enum { MAX_THREADS = MAX_CTA_THREADS * EMULATED_CLUSTER, EXCHANGE_SLOTS = 4 };

/* Dynamic shared memory of a cluster. Its address is a multiple of EMULATED_SHARED_STRIDE below 4 GiB, so that 32 bits
   hold an address, and the low 18 bits, which wgmma descriptors hold, are the offset in the CTA's memory. */
static char *shared_memory;

/* A wait ends when (*word & mask) != value. */
typedef struct wait_state { const uint32_t *word; uint32_t mask, value; } wait_state;

/* A copy by cp.async; src NULL and size 0: an arrival at mbarrier `smem`. */
typedef struct cp_async { uint32_t smem; const void *src; int32_t size, bytes, group; } cp_async;
typedef struct wgmma {
    float *d;
    emulated_tile a, b;
    float rows[2][32]; /* a from registers */
    int32_t n8, adds, from_registers, group;
} wgmma;

typedef struct fiber {
    emulated_thread_state state; /* first, so that emulated_thread points to the fiber */
    char *stack;
    void *context;
    wait_state wait;             /* word NULL: it can run */
    uint32_t cluster_generation; /* of the last arrival at the cluster barrier */
    int32_t bulk_group, cp_group, wgmma_group; /* number of groups that the thread has committed */
    std::vector<cp_async> cp;    /* issued, and not happened yet */
    std::vector<wgmma> products;
    int32_t ended;
#ifndef __x86_64__
    ucontext_t registers;
#endif
} fiber;

typedef struct barrier_state { uint32_t generation; int32_t arrived; } barrier_state;
/* Exchanges of the lanes whose mask begins with the same lane. A lane writes into the slot of its generation; lanes
   that are still to read the generation before find it in another slot. */
typedef struct exchange_state {
    barrier_state barrier;
    emulated_value value[EXCHANGE_SLOTS][32];
} exchange_state;
typedef struct cta_state {
    barrier_state named[NAMED_BARRIERS];
    int32_t alive; /* threads that have not ended */
    exchange_state exchange[MAX_WARPS][32];
} cta_state;

typedef struct tensor_map {
    uint64_t base, dims[4], strides[3];
    uint32_t box[4], element_bytes, swizzle; /* swizzle: bytes of a row of the pattern, 0, 64 or 128 */
} tensor_map;
typedef enum tma_kind { TMA_LOAD, TMA_STORE, TMA_ADD } tma_kind;
typedef struct tma_copy {
    fiber *thread;
    tensor_map map;
    uint32_t smem, bar, ctas;
    int32_t at[4], group;
    tma_kind kind;
} tma_copy;

emulated_thread_state *emulated_thread;
emulated_launch_state emulated_launch;
static fiber fibers[MAX_THREADS];
static cta_state ctas[EMULATED_CLUSTER];
static barrier_state cluster_barrier;
static int32_t cluster_threads; /* that have not ended */
static std::vector<tma_copy> copies; /* that have been issued and not happened */
static const void *running_kernel, *running_args;
static void *scheduler_context;
static int yielded; /* the thread that ran last waits for nothing, but lets others run */
static uint64_t random_state;

static uint32_t draw(void) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 33);
}

/* --- failures --- */

/* The program's symbol table, for names of static kernels. */
const char *emulated_kernel_name(const void *kernel) {
    static std::vector<char> image;
    const Elf64_Ehdr *header;
    const Elf64_Shdr *sections;
    int i;
    if (image.empty()) {
        FILE *f = fopen("/proc/self/exe", "rb");
        char block[65536];
        size_t n;
        while (f && (n = fread(block, 1, sizeof block, f)) > 0) image.insert(image.end(), block, block + n);
        if (f) fclose(f);
        if (image.size() < sizeof *header) return "?";
    }
    header = (const Elf64_Ehdr *)image.data();
    sections = (const Elf64_Shdr *)(image.data() + header->e_shoff);
    for (i = 0; i < header->e_shnum; i++) {
        const Elf64_Sym *symbols = (const Elf64_Sym *)(image.data() + sections[i].sh_offset);
        size_t k;
        if (sections[i].sh_type != SHT_SYMTAB) continue;
        for (k = 0; k < sections[i].sh_size / sizeof *symbols; k++)
            if (symbols[k].st_value == (uintptr_t)kernel && ELF64_ST_TYPE(symbols[k].st_info) == STT_FUNC)
                return image.data() + sections[sections[i].sh_link].sh_offset + symbols[k].st_name;
    }
    return "?";
}

void emulated_fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "emulator: %s: ", running_kernel ? emulated_kernel_name(running_kernel) : "no kernel");
    if (emulated_thread)
        fprintf(stderr, "block %u, thread %u: ", emulated_thread->block_index.x, emulated_thread->thread_index.x);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    abort();
}

/* --- fibers --- */

static fiber *self(void) { return (fiber *)(void *)emulated_thread; }

#ifdef __x86_64__
/* Saves the registers that a call preserves and the stack pointer to *from, and goes on where `to` was saved. */
extern "C" void emulated_switch(void **from, void *to);
__asm__(".text\n.globl emulated_switch\n.type emulated_switch, @function\nemulated_switch:\n"
        "    push %rbp\n    push %rbx\n    push %r12\n    push %r13\n    push %r14\n    push %r15\n"
        "    mov %rsp, (%rdi)\n    mov %rsi, %rsp\n"
        "    pop %r15\n    pop %r14\n    pop %r13\n    pop %r12\n    pop %rbx\n    pop %rbp\n    ret\n"
        ".size emulated_switch, . - emulated_switch\n");
static void leave(fiber *f) { emulated_switch(&f->context, scheduler_context); }
static void enter(fiber *f) { emulated_switch(&scheduler_context, f->context); }
#else
static ucontext_t scheduler_registers;
static void leave(fiber *f) { swapcontext(&f->registers, &scheduler_registers); }
static void enter(fiber *f) { swapcontext(&scheduler_registers, &f->registers); }
#endif

static void release_if_complete(barrier_state *b, int32_t count) {
    if (b->arrived == 0 || b->arrived < count) return;
    b->arrived = 0;
    b->generation++;
}

static void thread_main(void) {
    fiber *f;
    ((void (*)(const void *))(uintptr_t)running_kernel)(running_args);
    f = self();
    emulated_bulk_wait(0);
    emulated_cp_async_wait(-1);
    emulated_wgmma_wait(0);
    f->ended = 1;
    ctas[f->state.cta].alive--;
    release_if_complete(&ctas[f->state.cta].named[0], ctas[f->state.cta].alive);
    cluster_threads--;
    release_if_complete(&cluster_barrier, cluster_threads);
    leave(f);
    abort();
}

static void begin_thread(fiber *f) {
    if (!f->stack) {
        f->stack = (char *)mmap(NULL, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                                -1, 0);
        if (f->stack == MAP_FAILED) emulated_fail("no memory for a stack");
    }
    f->ended = 0;
    f->wait.word = NULL;
    f->bulk_group = f->cp_group = f->wgmma_group = 0;
#ifdef __x86_64__
    {
        void **top = (void **)(void *)(f->stack + STACK_BYTES);
        *--top = NULL; /* a return address that is never used; it aligns the stack as a call would */
        *--top = (void *)(uintptr_t)thread_main;
        top -= 6;
        memset(top, 0, 6 * sizeof *top);
        f->context = top;
    }
#else
    getcontext(&f->registers);
    f->registers.uc_stack.ss_sp = f->stack;
    f->registers.uc_stack.ss_size = STACK_BYTES;
    makecontext(&f->registers, thread_main, 0);
#endif
}

static void wait_while(const uint32_t *word, uint32_t mask, uint32_t value) {
    fiber *f = self();
    if ((*word & mask) != value) return;
    f->wait.word = word;
    f->wait.mask = mask;
    f->wait.value = value;
    leave(f);
}

void emulated_yield(void) {
    yielded = 1;
    leave(self());
}
void *emulated_dynamic_shared(void) { return shared_memory + self()->state.cta * (size_t)EMULATED_SHARED_STRIDE; }

/* --- barriers --- */

static void barrier_arrive(barrier_state *b, int32_t count) {
    b->arrived++;
    release_if_complete(b, count);
}
static void barrier_sync(barrier_state *b, int32_t count) {
    const uint32_t generation = b->generation;
    barrier_arrive(b, count);
    wait_while(&b->generation, 0xFFFFFFFFu, generation);
}
void emulated_barrier(int id, int count) {
    cta_state *c = &ctas[self()->state.cta];
    barrier_sync(&c->named[id], count ? count : c->alive);
}
void emulated_barrier_arrive(int id, int count) { barrier_arrive(&ctas[self()->state.cta].named[id], count); }

void emulated_cluster_arrive(void) {
    self()->cluster_generation = cluster_barrier.generation;
    barrier_arrive(&cluster_barrier, cluster_threads);
}
void emulated_cluster_wait(void) { wait_while(&cluster_barrier.generation, 0xFFFFFFFFu, self()->cluster_generation); }

const emulated_value *emulated_exchange(uint32_t mask, const void *mine, size_t bytes) {
    const fiber *f = self();
    exchange_state *x = &ctas[f->state.cta].exchange[f->state.warp][__builtin_ctz(mask)];
    emulated_value *values = x->value[x->barrier.generation % EXCHANGE_SLOTS];
    if (!(mask >> f->state.lane & 1)) emulated_fail("warp function with mask %08x, which lacks the lane", mask);
    if (bytes) memcpy(values[f->state.lane].bytes, mine, bytes);
    barrier_sync(&x->barrier, __builtin_popcount(mask));
    return values;
}

/* --- mbarrier: bytes that are still expected; phase in bit 0, arrivals that are missing in bits 1 to 15, the arrivals
   of a phase in bits 16 to 30 --- */

typedef struct mbarrier_state { int32_t bytes; uint32_t arrivals; } mbarrier_state;

static mbarrier_state *mbarrier_at(uint32_t bar) {
    if (bar % 8) emulated_fail("mbarrier at %08x, which is no multiple of 8", bar);
    return (mbarrier_state *)(uintptr_t)bar;
}
static void mbarrier_complete_phase(mbarrier_state *b) {
    if (b->bytes == 0 && (b->arrivals >> 1 & 0x7FFF) == 0)
        b->arrivals = (b->arrivals ^ 1u) | (b->arrivals >> 16 & 0x7FFF) << 1;
}
void emulated_mbarrier_init(uint32_t bar, uint32_t count) {
    mbarrier_state *b = mbarrier_at(bar);
    b->bytes = 0;
    b->arrivals = count << 16 | count << 1;
}
void emulated_mbarrier_arrive(uint32_t bar, int32_t expect_bytes) {
    mbarrier_state *b = mbarrier_at(bar);
    if ((b->arrivals >> 1 & 0x7FFF) == 0) emulated_fail("mbarrier %08x: more arrivals than a phase has", bar);
    b->bytes += expect_bytes;
    b->arrivals -= 2;
    mbarrier_complete_phase(b);
}
void emulated_mbarrier_complete(uint32_t bar, int32_t bytes) {
    mbarrier_state *b = mbarrier_at(bar);
    b->bytes -= bytes;
    mbarrier_complete_phase(b);
}
int emulated_mbarrier_test(uint32_t bar, uint32_t parity) { return (mbarrier_at(bar)->arrivals & 1) != parity; }
void emulated_mbarrier_wait(uint32_t bar, uint32_t parity) { wait_while(&mbarrier_at(bar)->arrivals, 1, parity); }

uint32_t emulated_mapa(uint32_t smem, uint32_t rank) {
    if (rank >= emulated_launch.cluster) emulated_fail("rank %u of a cluster of %u", rank, emulated_launch.cluster);
    return smem % EMULATED_SHARED_STRIDE + (uint32_t)(uintptr_t)shared_memory + rank * EMULATED_SHARED_STRIDE;
}

/* --- TMA --- */

CUresult emulated_tensor_map(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *base,
                             const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                             const cuuint32_t *element_strides, CUtensorMapInterleave interleave,
                             CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                             CUtensorMapFloatOOBfill fill) {
    tensor_map m;
    int i;
    (void)promotion;
    (void)fill;
    memset(&m, 0, sizeof m);
    m.base = (uintptr_t)base;
    m.element_bytes = type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1 : type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
    m.swizzle = swizzle == CU_TENSOR_MAP_SWIZZLE_128B ? 128 : swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64 : 0;
    if (rank != 4 || m.base % 16 || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE) return CUDA_ERROR_INVALID_VALUE;
    for (i = 0; i < 4; i++) {
        m.dims[i] = dims[i];
        m.box[i] = box[i];
        if (dims[i] < 1 || dims[i] > (cuuint64_t)1 << 32 || box[i] < 1 || box[i] > 256 || element_strides[i] != 1)
            return CUDA_ERROR_INVALID_VALUE;
    }
    for (i = 0; i < 3; i++) {
        m.strides[i] = strides[i];
        if (strides[i] % 16 || strides[i] >= (cuuint64_t)1 << 40) return CUDA_ERROR_INVALID_VALUE;
    }
    if (m.box[0] * m.element_bytes % 16 || (m.swizzle && m.box[0] * m.element_bytes > m.swizzle))
        return CUDA_ERROR_INVALID_VALUE;
    static_assert(sizeof m <= sizeof *map, "a map holds these fields");
    memset(map, 0, sizeof *map);
    memcpy(map, &m, sizeof m);
    return CUDA_SUCCESS;
}

/* Moves one row of a box, of 16-byte chunks whose place in shared memory the swizzle chooses. Stores write whole units
   of 16 bytes, as an H200 does: up to 15 bytes past the columns of the map. */
static void tma_row(const tma_copy *c, uint32_t smem, uint64_t row, int in_bounds) {
    const tensor_map *m = &c->map;
    const uint32_t width = m->box[0] * m->element_bytes;
    uint32_t b;
    for (b = 0; b < width; b += m->element_bytes) {
        const int64_t x = (int64_t)c->at[0] + b / m->element_bytes;
        const uint64_t unit = 16 / m->element_bytes, cols = c->kind == TMA_STORE ? (m->dims[0] + unit - 1) / unit * unit
                                                                                 : m->dims[0];
        const int inside = in_bounds && x >= 0 && (uint64_t)x < cols;
        uint32_t address = smem + b;
        char *global = (char *)(uintptr_t)(row + (uint64_t)x * m->element_bytes), *shared;
        if (m->swizzle) address ^= (address >> 7 & (m->swizzle / 16 - 1)) << 4;
        shared = (char *)(uintptr_t)address;
        if (c->kind == TMA_LOAD) {
            if (inside) memcpy(shared, global, m->element_bytes);
            else memset(shared, 0, m->element_bytes);
        } else if (inside && c->kind == TMA_STORE) memcpy(global, shared, m->element_bytes);
        else if (inside) *(float *)(void *)global += *(float *)(void *)shared;
    }
}
static void tma_box(const tma_copy *c, uint32_t smem) {
    const tensor_map *m = &c->map;
    const uint32_t width = m->box[0] * m->element_bytes;
    uint32_t i[4], line = 0;
    for (i[3] = 0; i[3] < m->box[3]; i[3]++)
        for (i[2] = 0; i[2] < m->box[2]; i[2]++)
            for (i[1] = 0; i[1] < m->box[1]; i[1]++, line++) {
                uint64_t row = m->base;
                int in_bounds = 1, k;
                for (k = 1; k < 4; k++) {
                    const int64_t at = (int64_t)c->at[k] + i[k];
                    in_bounds &= at >= 0 && (uint64_t)at < m->dims[k];
                    row += (uint64_t)at * m->strides[k - 1];
                }
                tma_row(c, smem + line * width, row, in_bounds);
            }
}
static void tma_happen(const tma_copy *c) {
    const uint32_t bytes = c->map.box[0] * c->map.box[1] * c->map.box[2] * c->map.box[3] * c->map.element_bytes;
    uint32_t rank;
    if (c->kind != TMA_LOAD) {
        tma_box(c, c->smem);
        return;
    }
    for (rank = 0; rank < EMULATED_CLUSTER; rank++)
        if (c->ctas >> rank & 1) {
            tma_box(c, emulated_mapa(c->smem, rank));
            emulated_mbarrier_complete(emulated_mapa(c->bar, rank), (int32_t)bytes);
        }
}
static void tma_issue(tma_copy *c, uint32_t smem, const CUtensorMap *map, const int32_t at[4]) {
    memcpy(&c->map, map, sizeof c->map);
    if (smem % (c->map.swizzle ? 128 : 16)) emulated_fail("TMA at %08x, which is not aligned", smem);
    c->thread = self();
    c->smem = smem;
    memcpy(c->at, at, sizeof c->at);
    c->group = c->thread->bulk_group;
    copies.push_back(*c);
}
void emulated_tma_load(uint32_t smem, const CUtensorMap *map, uint32_t bar, uint32_t cta_bits, const int32_t at[4]) {
    tma_copy c = {};
    c.kind = TMA_LOAD;
    c.bar = bar;
    c.ctas = cta_bits;
    tma_issue(&c, smem, map, at);
}
void emulated_tma_store(const CUtensorMap *map, uint32_t smem, int add, const int32_t at[4]) {
    tma_copy c = {};
    c.kind = add ? TMA_ADD : TMA_STORE;
    tma_issue(&c, smem, map, at);
}
void emulated_bulk_commit(void) { self()->bulk_group++; }
void emulated_bulk_wait(int groups) {
    const fiber *f = self();
    size_t i, kept = 0;
    for (i = 0; i < copies.size(); i++) {
        const tma_copy c = copies[i];
        if (c.kind != TMA_LOAD && c.thread == f && c.group < f->bulk_group - groups) tma_happen(&c);
        else copies[kept++] = c;
    }
    copies.resize(kept);
}
/* --- tensor cores --- */

/* Values of all codes of 16 and of 8 bits. */
static float values16[2][1 << 16], values8[2][1 << 8];

/* A sign bit, `exponent_bits` and `mantissa_bits`; the largest exponent holds NaN and infinities unless `finite`, whose
   only NaN is the last code. */
static float decode(uint32_t code, int exponent_bits, int mantissa_bits, int finite) {
    const uint32_t mantissa = code & ((1u << mantissa_bits) - 1), top = (1u << exponent_bits) - 1;
    const uint32_t exponent = code >> mantissa_bits & top;
    const int bias = (1 << (exponent_bits - 1)) - 1;
    float v = ldexpf((float)(exponent ? mantissa | 1u << mantissa_bits : mantissa),
                     (int)(exponent ? exponent : 1) - bias - mantissa_bits);
    if (exponent == top && (!finite || mantissa == (1u << mantissa_bits) - 1))
        v = mantissa ? __builtin_nanf("") : __builtin_inff();
    return code >> (exponent_bits + mantissa_bits) & 1 ? -v : v;
}
static void fill_values(void) {
    uint32_t code;
    for (code = 0; code < 1u << 16; code++) {
        values16[EMULATED_BF16][code] = decode(code, 8, 7, 0);
        values16[EMULATED_F16][code] = decode(code, 5, 10, 0);
    }
    for (code = 0; code < 1u << 8; code++) {
        values8[0][code] = decode(code, 4, 3, 1);
        values8[1][code] = decode(code, 5, 2, 0);
    }
}

/* The sums of both instructions. In double precision, so that the order of the products hardly ever shows: kernels
   permute them, and products beyond the range of fp32 may cancel. */
#ifdef __x86_64__
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
static void multiply(int count, int columns, const float *a, const float (*b)[64], float *sums) {
    double wide[64];
    int k, c;
    for (c = 0; c < columns; c++) wide[c] = sums[c];
    for (k = 0; k < count; k++)
        for (c = 0; c < columns; c++) wide[c] += (double)a[k] * b[k][c];
    for (c = 0; c < columns; c++) sums[c] = (float)wide[c];
}
/* Lane l holds rows l / 4 and l / 4 + 8 of a, column l / 4 of b; of k columns 2 (l % 4), the next one, and both 8
   further; and of d columns 2 (l % 4) and the next. */
void emulated_mma(emulated_type type, float d[4], const uint32_t a[4], const uint32_t *b) {
    const uint32_t mine[6] = { a[0], a[1], a[2], a[3], b[0], b[1] };
    const emulated_value *all = emulated_exchange(0xFFFFFFFFu, mine, sizeof mine);
    const int lane = self()->state.lane;
    const float *values = values16[type];
    float rows[2][16], columns[16][64];
    int i, k;
    for (i = 0; i < 2; i++)
        for (k = 0; k < 16; k += 2) {
            uint16_t x[12], y[12];
            memcpy(x, all[lane / 4 * 4 + k % 8 / 2].bytes, sizeof x);
            memcpy(y, all[(2 * (lane % 4) + i) * 4 + k % 8 / 2].bytes, sizeof y);
            rows[i][k] = values[x[2 * (k / 8 * 2 + i)]];
            rows[i][k + 1] = values[x[2 * (k / 8 * 2 + i) + 1]];
            columns[k][i] = values[y[2 * (4 + k / 8)]];
            columns[k + 1][i] = values[y[2 * (4 + k / 8) + 1]];
        }
    for (i = 0; i < 2; i++) multiply(16, 2, rows[i], columns, d + 2 * i);
}

/* Element k of row mn is v[k * step]. */
static void wgmma_row(const fiber *f, const emulated_tile *t, int mn, float *v, int step) {
    const char *base = shared_memory + f->state.cta * (size_t)EMULATED_SHARED_STRIDE;
    const uint32_t start = (uint32_t)(t->desc & 0x3FFF) << 4, leading = (uint32_t)(t->desc >> 16 & 0x3FFF) << 4;
    const uint32_t stride = (uint32_t)(t->desc >> 32 & 0x3FFF) << 4;
    const int swizzled = t->desc >> 62 == 1;
    uint32_t i;
    int k;
    if (!swizzled && (t->desc >> 62 || t->mn_major))
        emulated_fail("a wgmma descriptor of another swizzle than 128 bytes: %016llx", (long long)t->desc);
    if (t->mn_major) /* boxes of 64 elements of mn; 8 rows of k make a pattern of the swizzle */
        for (k = 0; k < 16; k++) {
            const uint32_t at = start + (uint32_t)(mn / 64) * leading + (uint32_t)(k / 8) * stride +
                                (uint32_t)(k % 8 * 128 + mn % 64 * 2);
            const void *from = base + ((at ^ (at >> 7 & 7) << 4) & 0x3FFFF);
            v[k * step] = values16[t->type][*(const uint16_t *)from];
        }
    else
        for (i = 0; i < 32; i += 16) {
            /* without swizzle: blocks of 8 rows of 16 bytes, `leading` from one to the next along k */
            const uint32_t at = start + (uint32_t)(mn / 8) * stride +
                                (swizzled ? (uint32_t)(mn % 8) * 128 + i : (uint32_t)(mn % 8) * 16 + i / 16 * leading);
            const char *chunk = base + ((swizzled ? at ^ (at >> 7 & 7) << 4 : at) & 0x3FFFF);
            if (at % 16) emulated_fail("a wgmma descriptor at %08x", at);
            if (t->type <= EMULATED_F16)
                for (k = 0; k < 8; k++)
                    v[((int)i / 2 + k) * step] = values16[t->type][((const uint16_t *)(const void *)chunk)[k]];
            else
                for (k = 0; k < 16; k++)
                    v[((int)i + k) * step] = values8[t->type - EMULATED_E4M3][((const uint8_t *)chunk)[k]];
        }
}
static void wgmma_happen(const fiber *f, const wgmma *p) {
    const int lane = f->state.lane, first_row = 16 * (f->state.warp % 4) + lane / 4;
    float a[32], columns[32][64], sums[64];
    int j, half, row;
    for (j = 0; j < p->n8; j++)
        for (half = 0; half < 2; half++)
            wgmma_row(f, &p->b, 8 * j + 2 * (lane % 4) + half, &columns[0][2 * j + half], 64);
    for (row = 0; row < 2; row++) {
        if (!p->from_registers) wgmma_row(f, &p->a, first_row + 8 * row, a, 1);
        for (j = 0; j < 2 * p->n8; j++) sums[j] = p->adds ? p->d[4 * (j / 2) + 2 * row + j % 2] : 0.0f;
        multiply(p->b.type <= EMULATED_F16 ? 16 : 32, 2 * p->n8, p->from_registers ? p->rows[row] : a, columns, sums);
        for (j = 0; j < 2 * p->n8; j++) p->d[4 * (j / 2) + 2 * row + j % 2] = sums[j];
    }
}
static int64_t wgmmas_by_n8[33];
int64_t emulated_wgmmas(int n8) { return wgmmas_by_n8[n8]; }
/* Lane l holds columns 2 (l % 4), the next, and both 8 further of rows l / 4 (registers 0, 2) and 8 further (1, 3). */
void emulated_wgmma(int n8, float *d, const emulated_tile *a, const uint32_t *regs, const emulated_tile *b, int adds) {
    fiber *f = self();
    wgmma p = {};
    wgmmas_by_n8[n8]++;
    p.d = d;
    p.b = *b;
    p.n8 = n8;
    p.adds = adds;
    p.from_registers = regs != NULL;
    p.group = f->wgmma_group;
    if (regs) {
        const emulated_value *all = emulated_exchange(0xFFFFFFFFu, regs, 16);
        int row, k;
        for (row = 0; row < 2; row++)
            for (k = 0; k < 16; k++) {
                uint16_t halves[8];
                memcpy(halves, all[f->state.lane / 4 * 4 + k % 8 / 2].bytes, sizeof halves);
                p.rows[row][k] = values16[b->type][halves[2 * (k / 8 * 2 + row) + k % 2]];
            }
    } else p.a = *a;
    f->products.push_back(p);
}
void emulated_wgmma_commit(void) { self()->wgmma_group++; }
/* Lets the products of the first groups happen, in their order. */
static void wgmma_progress(fiber *f, int32_t before_group) {
    size_t i;
    for (i = 0; i < f->products.size() && f->products[i].group < before_group; i++) wgmma_happen(f, &f->products[i]);
    f->products.erase(f->products.begin(), f->products.begin() + (long)i);
}
void emulated_wgmma_wait(int groups) { wgmma_progress(self(), self()->wgmma_group - groups); }

/* --- cp.async --- */

static void cp_async_progress(fiber *f, int32_t before_group) {
    size_t i;
    for (i = 0; i < f->cp.size() && f->cp[i].group < before_group; i++) {
        const cp_async *c = &f->cp[i];
        char *to = (char *)(uintptr_t)c->smem;
        if (!c->size) {
            emulated_mbarrier_arrive(c->smem, 0);
            continue;
        }
        if (c->bytes) memcpy(to, c->src, (size_t)c->bytes);
        memset(to + c->bytes, 0, (size_t)(c->size - c->bytes));
    }
    f->cp.erase(f->cp.begin(), f->cp.begin() + (long)i);
}
void emulated_cp_async(uint32_t smem, const void *src, int size, int bytes) {
    const cp_async c = { smem, src, size, bytes > 0 ? bytes : 0, self()->cp_group };
    if (smem % (uint32_t)size || (bytes > 0 && (uintptr_t)src % (uintptr_t)size))
        emulated_fail("cp.async of %d bytes from %p to %08x, which is not aligned", size, src, smem);
    self()->cp.push_back(c);
}
void emulated_cp_async_arrive(uint32_t bar) {
    const cp_async c = { bar, NULL, 0, 0, self()->cp_group };
    self()->cp.push_back(c);
}
void emulated_cp_async_commit(void) { self()->cp_group++; }
void emulated_cp_async_wait(int groups) {
    cp_async_progress(self(), groups < 0 ? INT32_MAX : self()->cp_group - groups);
}

/* --- the scheduler --- */

/* Lets some of what is asynchronous happen, or all. Returns whether any did. */
static int progress(int threads, int all) {
    size_t i, kept = 0;
    int any = 0, t;
    for (t = 0; t < threads; t++) {
        fiber *f = &fibers[t];
        if ((f->cp.empty() && f->products.empty()) || (!all && draw() & 1)) continue;
        any = 1;
        cp_async_progress(f, INT32_MAX);
        wgmma_progress(f, f->wgmma_group);
    }
    for (i = 0; i < copies.size(); i++) {
        const tma_copy c = copies[i];
        if (!all && draw() & 1) copies[kept++] = c;
        else {
            tma_happen(&c);
            any = 1;
        }
    }
    copies.resize(kept);
    return any;
}

static int can_run(const fiber *f) {
    return !f->ended && (!f->wait.word || (*f->wait.word & f->wait.mask) != f->wait.value);
}
/* Resumes every thread that can run, warps and their lanes in an order drawn at random. A warp runs until all of its
   lanes wait: as on hardware, whose lanes are together again behind a loop that waits, no other warp runs between two
   lanes that have been released at the same time. Returns how many threads ran. */
static int run_round(int threads) {
    int order[MAX_THREADS / 32], warps = (threads + 31) / 32, ran = 0, i;
    for (i = 0; i < warps; i++) order[i] = i;
    for (i = warps - 1; i > 0; i--) {
        const int j = (int)(draw() % (uint32_t)(i + 1)), swap = order[i];
        order[i] = order[j];
        order[j] = swap;
    }
    for (i = 0; i < warps; i++) {
        const uint32_t flip = draw() & 31;
        int before, k;
        do {
            before = ran;
            for (k = 0; k < 32; k++) {
                const int t = 32 * order[i] + (k ^ (int)flip);
                if (t >= threads || !can_run(&fibers[t])) continue;
                fibers[t].wait.word = NULL;
                emulated_thread = &fibers[t].state;
                enter(&fibers[t]);
                emulated_thread = NULL;
                ran += !yielded;
                yielded = 0;
            }
        } while (ran > before);
    }
    return ran;
}
static int all_wait(int threads) {
    int t;
    for (t = 0; t < threads; t++)
        if (can_run(&fibers[t])) return 0;
    return 1;
}
static void report_deadlock(int threads) {
    int t, listed = 0;
    for (t = 0; t < threads && listed < 12; t++) {
        const fiber *f = &fibers[t];
        if (f->ended || (t % 32 && f[-1].wait.word == f->wait.word)) continue;
        fprintf(stderr, "  CTA %d, thread %u waits at %p (%08x) for another value than %08x\n", f->state.cta,
                f->state.thread_index.x, (const void *)f->wait.word, *f->wait.word, f->wait.value);
        listed++;
    }
    emulated_fail("all threads wait");
}

/* Memory that a launch finds in another state before it waits for its predecessor: whether it does now, `early`, and
   what belongs there. */
static struct { char *at; std::vector<char> early, final; uint32_t changed; } early_reads;
void emulated_early_reads(void *at, const void *early, size_t bytes) {
    early_reads.at = (char *)at;
    early_reads.early.assign((const char *)early, (const char *)early + (at ? bytes : 0));
}
void emulated_dependency_wait(void) { wait_while(&early_reads.changed, 1, 1); }
static void begin_dependency(void) {
    early_reads.changed = emulated_launch.programmatic && early_reads.at;
    if (!early_reads.changed) return;
    early_reads.final.assign(early_reads.at, early_reads.at + early_reads.early.size());
    memcpy(early_reads.at, early_reads.early.data(), early_reads.early.size());
}
static int end_dependency(void) {
    if (!early_reads.changed) return 0;
    memcpy(early_reads.at, early_reads.final.data(), early_reads.final.size());
    early_reads.changed = 0;
    return 1;
}

/* Runs the CTAs of one cluster, the first of which is `block`. Shared memory begins with bytes drawn at random. */
static void run_cluster(uint3 block) {
    const unsigned cta_threads = emulated_launch.block.x, cluster = emulated_launch.cluster;
    const int threads = (int)(cta_threads * cluster);
    unsigned c, t;
    memset(&cluster_barrier, 0, sizeof cluster_barrier);
    cluster_threads = threads;
    for (c = 0; c < cluster; c++) {
        uint32_t *words = (uint32_t *)(void *)(shared_memory + c * (size_t)EMULATED_SHARED_STRIDE);
        size_t i;
        unsigned w, l;
        for (i = 0; i < emulated_launch.shared_bytes / 4; i++) words[i] = draw() | 0x7F800000u;
        memset(ctas[c].named, 0, sizeof ctas[c].named);
        for (w = 0; w < (cta_threads + 31) / 32; w++)
            for (l = 0; l < 32; l++) memset(&ctas[c].exchange[w][l].barrier, 0, sizeof(barrier_state));
        ctas[c].alive = (int32_t)cta_threads;
        for (t = 0; t < cta_threads; t++) {
            fiber *f = &fibers[c * cta_threads + t];
            f->state.thread_index = make_uint3(t, 0, 0);
            f->state.block_index = make_uint3(block.x + c, block.y, block.z);
            f->state.cta = (int)c;
            f->state.warp = (int)t / 32;
            f->state.lane = (int)t % 32;
            begin_thread(f);
        }
    }
    begin_dependency();
    while (cluster_threads > 0) {
        const int ran = run_round(threads);
        if (!progress(threads, ran == 0) && !ran && cluster_threads > 0 && all_wait(threads) && !end_dependency())
            report_deadlock(threads);
    }
    (void)end_dependency();
    (void)progress(threads, 1);
}

static void begin(void) {
    const char *seed = getenv("GMM_EMULATOR_SEED");
    uint64_t at;
    for (at = (uint64_t)1 << 30; at < (uint64_t)1 << 32 && !shared_memory; at += 1 << 24) {
        void *p = mmap((void *)(uintptr_t)at, EMULATED_CLUSTER * (size_t)EMULATED_SHARED_STRIDE, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
        if (p == (void *)(uintptr_t)at) shared_memory = (char *)p;
        else if (p != MAP_FAILED) (void)munmap(p, EMULATED_CLUSTER * (size_t)EMULATED_SHARED_STRIDE);
    }
    if (!shared_memory) emulated_fail("no address below 4 GiB is free for shared memory");
    random_state = seed ? strtoull(seed, NULL, 10) : 0;
    fill_values();
}

void emulated_run(const void *kernel, const void *args, const emulated_launch_state *launch) {
    uint3 block;
    if (!shared_memory) begin();
    emulated_launch = *launch;
    running_kernel = kernel;
    running_args = args;
    if (launch->block.x > MAX_CTA_THREADS || launch->block.y * launch->block.z != 1)
        emulated_fail("blocks have one dimension, of up to %d threads", (int)MAX_CTA_THREADS);
    for (block.z = 0; block.z < launch->grid.z; block.z++)
        for (block.y = 0; block.y < launch->grid.y; block.y++)
            for (block.x = 0; block.x < launch->grid.x; block.x += launch->cluster) run_cluster(block);
    running_kernel = NULL;
}
