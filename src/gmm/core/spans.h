/* Records the memory of a call, for the check that what it writes overlaps nothing else (gmm__check_overlap); also the
   heap that sorts addresses there and the candidates of routing. */

/* Restores a min-heap after element i was increased. */
static GMM__UNUSED void gmm__heap_sift_down(uint64_t *heap, int64_t count, int64_t i) {
    const uint64_t key = heap[i];
    int64_t child;
    while ((child = 2 * i + 1) < count) {
        if (child + 1 < count && heap[child + 1] < heap[child]) child++;
        if (heap[child] >= key) break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = key;
}

/* Sorts a min-heap into descending order. */
static GMM__UNUSED void gmm__heap_sort(uint64_t *heap, int64_t count) {
    int64_t i;
    for (i = count - 1; i > 0; i--) {
        const uint64_t least = heap[0];
        heap[0] = heap[i];
        heap[i] = least;
        gmm__heap_sift_down(heap, i, 0);
    }
}

/* Repeats a box `count` times at a distance of `step` bytes, which is at least its extent. */
static void gmm__box_repeat(gmm__box *b, int64_t count, int64_t step) {
    const int32_t outermost = b->loops - 1;
    if (count < 1) b->width = 0;
    if (count <= 1) return;
    if (b->loops == 0 && step == b->width) b->width *= count;
    else if (b->loops > 0 && step == b->count[outermost] * b->step[outermost]) b->count[outermost] *= count;
    else {
        b->count[b->loops] = count;
        b->step[b->loops++] = step;
    }
}
/* The address behind the last byte of a box. */
static uint64_t gmm__box_end(const gmm__box *b) {
    uint64_t end = b->address + (uint64_t)b->width;
    int32_t i;
    for (i = 0; i < b->loops; i++) end += (uint64_t)((b->count[i] - 1) * b->step[i]);
    return end;
}

/* The address of box i of a span, and the box of a span at an address. */
static uint64_t gmm__span_at(const gmm__span *s, int64_t i) {
    return s->table ? (uintptr_t)s->table[i] : s->box.address + (uint64_t)(i * s->stride);
}
static gmm__box gmm__span_box(const gmm__span *s, uint64_t address) {
    gmm__box box = s->box;
    box.address = address;
    return box;
}

/* Records memory of a call for gmm__check_overlap: `count` boxes, at the addresses of `table` or `stride` bytes
   apart. */
static void gmm__add_boxes(gmm__call *call, const char *name, const char *part, int writes, const gmm__box *box,
                           void *const *table, int64_t count, int64_t stride) {
    gmm__span *s = &call->span[call->spans];
    const size_t length = strlen(name), max_length = sizeof s->name - 1;
    int64_t i;
    if (call->query || box->width == 0 || count < 1 || (!table && !box->address) || call->spans == GMM__SPANS) return;
    call->spans++;
    memcpy(s->name, name, length < max_length ? length : max_length);
    s->name[length < max_length ? length : max_length] = 0;
    s->part = part;
    s->writes = writes;
    s->table = table;
    s->count = count;
    s->stride = stride;
    s->box = *box;
    s->size = gmm__box_end(box) - box->address;
    s->low = s->high = gmm__span_at(s, 0);
    for (i = 1; i < count; i++) {
        const uint64_t address = gmm__span_at(s, i);
        if (address < s->low) s->low = address;
        if (address > s->high) s->high = address;
    }
    s->high += s->size;
}
/* The box of `rows` rows of `width` bytes, `pitch` bytes apart. */
static gmm__box gmm__rows_box(const void *address, int64_t rows, int64_t width, int64_t pitch) {
    gmm__box box;
    memset(&box, 0, sizeof box);
    box.address = (uintptr_t)address;
    box.width = width;
    gmm__box_repeat(&box, rows, pitch);
    return box;
}

/* Records `bytes` consecutive bytes of a call for gmm__check_overlap. */
static GMM__UNUSED void gmm__add_span(gmm__call *call, const char *name, const char *part, int writes,
                                      const void *address, int64_t bytes) {
    const gmm__box box = gmm__rows_box(address, 1, bytes, bytes);
    gmm__add_boxes(call, name, part, writes, &box, NULL, 1, 0);
}

/* Whether an operation writes the matrices of a role. */
static int gmm__writes(gmm_op op, int role) {
    if (op == GMM_OP_UNPERMUTE_FWD) return role == GMM__OUT;
    if (op == GMM_OP_UNPERMUTE_BWD) return role == GMM__DROWS;
    return role == GMM__Y || role == GMM__DX || role == GMM__DW || role == GMM__DB || role == GMM__DW2 ||
           role == GMM__DB2;
}

/* Records the elements ("") or the scales (".scale") of an operand: one box for each matrix, `stride` bytes apart or at
   the addresses of a table, which is recorded too. The host cannot read the addresses in a table in device memory. */
static void gmm__add_operand(gmm__call *call, int role, const char *name, const char *part, gmm__box box,
                             void *const *table, int64_t matrices, int64_t stride) {
    const int readable = call->ctx->config.space == GMM_SPACE_CPU ||
                     (call->mat[role].flags & (uint32_t)GMM_MAT_TABLE_ON_HOST);
    if (table)
        gmm__add_span(call, name, part[0] ? ".scale_table" : ".table", 0, table, matrices * (int64_t)sizeof *table);
    else if (call->op != GMM_OP_ACCUMULATE) { /* an accumulation may write y over one matrix of x: boxes stay apart */
        gmm__box_repeat(&box, matrices, stride);
        matrices = 1;
    }
    if (!table || readable)
        gmm__add_boxes(call, name, part, gmm__writes(call->op, role), &box, table, matrices, stride);
}
