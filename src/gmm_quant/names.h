/* The functions of this header stand in one unit; what precedes stands in every unit of the implementation. */
#if GMM__HOLDS(0)

GMMDEF int32_t gmm_dtype_bits(gmm_dtype dtype) {
    switch (dtype) {
#define GMM__X(name, value, text, bits) case name: return bits;
        GMM_DTYPE_LIST(GMM__X)
#undef GMM__X
    default: return 0;
    }
}

GMMDEF GMM__NOINLINE const char *gmm_dtype_name(gmm_dtype dtype) {
    switch (dtype) {
#define GMM__X(name, value, text, bits) case name: return #text;
        GMM_DTYPE_LIST(GMM__X)
#undef GMM__X
    default: return "?";
    }
}

GMMDEF const char *gmm_scaling_name(gmm_scaling scaling) {
    switch (scaling) {
#define GMM__X(name, value, text, dtype, rows, cols) case name: return #text;
        GMM_SCALING_LIST(GMM__X)
#undef GMM__X
    default: return "?";
    }
}

GMMDEF const char *gmm_recipe_name(gmm_recipe_kind kind) {
    switch (kind) {
#define GMM__X(name, value, text) case name: return text;
        GMM_RECIPE_LIST(GMM__X)
#undef GMM__X
    default: return "?";
    }
}

GMMDEF const char *gmm_status_name(gmm_status status) {
    switch (status) {
#define GMM__X(name, value, text) case name: return #name;
        GMM_STATUS_LIST(GMM__X)
#undef GMM__X
    default: return "?";
    }
}

GMMDEF const char *gmm_status_string(gmm_status status) {
    switch (status) {
#define GMM__X(name, value, text) case name: return text;
        GMM_STATUS_LIST(GMM__X)
#undef GMM__X
    default: return "unknown status";
    }
}

