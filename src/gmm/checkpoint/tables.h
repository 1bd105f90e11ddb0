/* ................................................................................................. 15.2 Tables ... */
/* Tables of named tensors over storages, with a hash of names. */

typedef struct gmm__ck_storage {
    const char *base;
    int64_t bytes;
} gmm__ck_storage;

struct gmm_ckpt_table {
    gmm__ck_arena arena;
    gmm_ckpt_tensor *tensors;
    gmm__ck_storage *storages;
    int64_t count, capacity, storage_count, storage_capacity;
    int32_t *slots; /* open addressing: index + 1 of a tensor, 0 = free */
    int64_t slot_count;
    size_t longest; /* length of the longest name */
};

static uint64_t gmm__ck_hash(const char *text, size_t length, uint64_t h) {
    size_t i;
    for (i = 0; i < length; i++) h = (h ^ (unsigned char)text[i]) * 0x100000001B3u;
    h ^= h >> 29;
    h *= 0x9E3779B97F4A7C15u;
    return h ^ h >> 32;
}

/* Bytes of the unit that a copy moves: one element; one byte of packed elements and of unknown dtypes. */
static int64_t gmm__ck_unit_bytes(gmm_dtype dtype) {
    const int32_t bits = gmm_dtype_bits(dtype);
    return bits < 8 ? 1 : bits / 8;
}

static int64_t gmm__ck_unit_count(const gmm_ckpt_tensor *t) { return t->bytes / gmm__ck_unit_bytes(t->dtype); }

/* Computes the bytes of a tensor from its shape and dtype. Returns 0 where they overflow or are no whole number. */
static int gmm__ck_tensor_bytes(const gmm_ckpt_tensor *t, int64_t *bytes) {
    int64_t elements = 1, bits = 0;
    int32_t d;
    for (d = 0; d < t->rank; d++)
        if (t->shape[d] == 0) {
            *bytes = 0;
            return 1;
        }
    for (d = 0; d < t->rank; d++)
        if (!gmm__mul(elements, t->shape[d], &elements)) return 0;
    if (!gmm__mul(elements, gmm_dtype_bits(t->dtype), &bits)) return 0;
    *bytes = bits / 8;
    return bits % 8 == 0;
}

GMMDEF gmm_status gmm_ckpt_table_create(gmm_ckpt_table **out, const gmm_allocator *allocator, gmm_error *error) {
    gmm_ckpt_table *t;
    gmm_allocator a;
    if (!out) return gmm__fail(error, GMM_E_NULL, "gmm_ckpt_table_create: out is NULL");
    *out = NULL;
    if (allocator && !allocator->alloc != !allocator->release)
        return gmm__fail(error, GMM_E_ARG,
                         "gmm_ckpt_table_create: allocator: 1 of 2 functions is set; set both or none");
    a = gmm__ck_allocator(allocator);
    t = (gmm_ckpt_table *)a.alloc(a.user, sizeof *t);
    if (!t) return gmm__fail(error, GMM_E_MEMORY, "gmm_ckpt_table_create: no memory");
    memset(t, 0, sizeof *t);
    t->arena.allocator = a;
    *out = t;
    return GMM_OK;
}

GMMDEF void gmm_ckpt_table_destroy(gmm_ckpt_table *table) {
    gmm_allocator a;
    if (!table) return;
    a = table->arena.allocator;
    gmm__ck_arena_release(&table->arena);
    a.release(a.user, table);
}

GMMDEF gmm_status gmm_ckpt_table_add_storage(gmm_ckpt_table *table, const void *base, int64_t bytes, int32_t *storage,
                                             gmm_error *error) {
    static const char fn[] = "gmm_ckpt_table_add_storage";
    void *array;
    if (!table || !storage) return gmm__fail(error, GMM_E_NULL, "%s: %s is NULL", fn, table ? "storage" : "table");
    if (bytes < 0) return gmm__fail(error, GMM_E_ARG, "%s: bytes is %lld: must be >= 0", fn, (long long)bytes);
    if (table->storage_count == INT32_MAX) return gmm__fail(error, GMM_E_ARG, "%s: 2^31 - 1 storages are the most", fn);
    array = table->storages;
    if (!gmm__ck_reserve(&table->arena, &array, table->storage_count, &table->storage_capacity,
                         sizeof *table->storages))
        return gmm__fail(error, GMM_E_MEMORY, "%s: no memory", fn);
    table->storages = (gmm__ck_storage *)array;
    table->storages[table->storage_count].base = (const char *)base;
    table->storages[table->storage_count].bytes = bytes;
    *storage = (int32_t)table->storage_count++;
    return GMM_OK;
}

/* The hash slot of a name: the one that holds it, or the free one that it would be stored in. */
static int64_t gmm__ck_hash_slot(const gmm_ckpt_table *t, const char *name, size_t length) {
    int64_t i = (int64_t)(gmm__ck_hash(name, length, 0) & (uint64_t)(t->slot_count - 1));
    for (; t->slots[i]; i = (i + 1) & (t->slot_count - 1))
        if (!strcmp(t->tensors[t->slots[i] - 1].name, name)) break;
    return i;
}

static int gmm__ck_rehash(gmm_ckpt_table *t) {
    const int64_t count = t->slot_count ? t->slot_count * 2 : 128;
    int32_t *slots = (int32_t *)gmm__ck_alloc(&t->arena, count, sizeof *slots);
    int64_t i;
    if (!slots) return 0;
    t->slots = slots;
    t->slot_count = count;
    for (i = 0; i < t->count; i++)
        slots[gmm__ck_hash_slot(t, t->tensors[i].name, strlen(t->tensors[i].name))] = (int32_t)(i + 1);
    return 1;
}

static gmm_status gmm__ck_add_tensor(gmm_ckpt_table *t, const gmm_ckpt_tensor *tensor, const char *fn,
                                     gmm_ckpt_report *report) {
    const char *name = tensor->name;
    int64_t bytes = 0, slot, d;
    void *array = t->tensors;
    size_t length;
    char *copy;
    if (!name) return gmm__ck_fail(report, GMM_CKPT_ARGUMENT, NULL, fn, "tensor.name is NULL");
    if (tensor->rank < 0 || tensor->rank > GMM_CKPT_RANK)
        return gmm__ck_fail(report, GMM_CKPT_ARGUMENT, name, fn, "rank %d must be 0 to %d", (int)tensor->rank,
                            (int)GMM_CKPT_RANK);
    for (d = 0; d < tensor->rank; d++)
        if (tensor->shape[d] < 0)
            return gmm__ck_fail(report, GMM_CKPT_ARGUMENT, name, fn, "extent %d is %lld: must be >= 0", (int)d,
                                (long long)tensor->shape[d]);
    if (tensor->dtype < GMM_NONE || tensor->dtype > GMM_F64)
        return gmm__ck_fail(report, GMM_CKPT_DTYPE, name, fn, "%d is no dtype", (int)tensor->dtype);
    if (tensor->dtype != GMM_NONE && !gmm__ck_tensor_bytes(tensor, &bytes))
        return gmm__ck_fail(report, GMM_CKPT_OVERFLOW, name, fn, "its shape of %s makes no 63-bit number of bytes",
                            gmm_dtype_name(tensor->dtype));
    if (tensor->dtype != GMM_NONE && bytes != tensor->bytes)
        return gmm__ck_fail(report, GMM_CKPT_ARGUMENT, name, fn, "it has %lld bytes, but its shape of %s makes %lld",
                            (long long)tensor->bytes, gmm_dtype_name(tensor->dtype), (long long)bytes);
    if (tensor->storage < 0 || tensor->storage >= t->storage_count)
        return gmm__ck_fail(report, GMM_CKPT_ARGUMENT, name, fn, "storage %d is none of the table's %lld",
                            (int)tensor->storage, (long long)t->storage_count);
    if (tensor->offset < 0 || tensor->bytes < 0 || tensor->bytes > t->storages[tensor->storage].bytes ||
        tensor->offset > t->storages[tensor->storage].bytes - tensor->bytes)
        return gmm__ck_fail(report, GMM_CKPT_ARGUMENT, name, fn, "%lld bytes at %lld leave the storage of %lld",
                            (long long)tensor->bytes, (long long)tensor->offset,
                            (long long)t->storages[tensor->storage].bytes);
    if (t->count == INT32_MAX - 1) return gmm__ck_fail(report, GMM_CKPT_OVERFLOW, name, fn, "too many tensors");
    length = strlen(name);
    if (2 * (t->count + 1) > t->slot_count && !gmm__ck_rehash(t))
        return gmm__ck_fail(report, GMM_CKPT_NO_MEMORY, name, fn, "no memory");
    slot = gmm__ck_hash_slot(t, name, length);
    if (t->slots[slot]) return gmm__ck_fail(report, GMM_CKPT_DUPLICATE_KEY, name, fn, "the name is taken already");
    copy = gmm__ck_copy_text(&t->arena, name, length);
    if (!copy || !gmm__ck_reserve(&t->arena, &array, t->count, &t->capacity, sizeof *t->tensors))
        return gmm__ck_fail(report, GMM_CKPT_NO_MEMORY, name, fn, "no memory");
    t->tensors = (gmm_ckpt_tensor *)array;
    t->tensors[t->count] = *tensor;
    t->tensors[t->count].name = copy;
    t->slots[slot] = (int32_t)++t->count;
    if (length > t->longest) t->longest = length;
    return GMM_OK;
}

GMMDEF gmm_status gmm_ckpt_table_add(gmm_ckpt_table *table, const gmm_ckpt_tensor *tensor, gmm_ckpt_report *report) {
    static const char fn[] = "gmm_ckpt_table_add";
    gmm__ck_reset_report(report);
    if (!table || !tensor) {
        if (report) {
            report->reason = GMM_CKPT_ARGUMENT;
            (void)gmm__fail(&report->error, GMM_E_NULL, "%s: %s is NULL", fn, table ? "tensor" : "table");
        }
        return GMM_E_NULL;
    }
    return gmm__ck_add_tensor(table, tensor, fn, report);
}

GMMDEF const gmm_ckpt_tensor *gmm_ckpt_table_tensors(const gmm_ckpt_table *table, int64_t *count) {
    if (count) *count = table ? table->count : 0;
    return table ? table->tensors : NULL;
}

GMMDEF int64_t gmm_ckpt_table_find(const gmm_ckpt_table *table, const char *name) {
    if (!table || !name || !table->slot_count) return -1;
    return (int64_t)table->slots[gmm__ck_hash_slot(table, name, strlen(name))] - 1;
}

