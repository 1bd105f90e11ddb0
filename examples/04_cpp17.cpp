// The header in a C++17 file, implementation included: top-k routing to experts and back. The experts here are the
// identity, so that unpermute returns every token, weighted by the sum of its probabilities.
#define GMM_IMPLEMENTATION
#include "gmm.h"

#include <cmath>
#include <cstdio>
#include <memory>
#include <new>
#include <stdexcept>
#include <vector>

namespace {

struct Destroy {
    void operator()(gmm_context *ctx) const { gmm_destroy(ctx); }
};
using Context = std::unique_ptr<gmm_context, Destroy>;

Context make_context() {
    gmm_context *ctx = nullptr;
    gmm_error error;
    if (gmm_create(&ctx, nullptr, &error) != GMM_OK) throw std::runtime_error(error.text);
    return Context(ctx);
}

void check(const Context &ctx, gmm_status status) {
    if (status != GMM_OK) throw std::runtime_error(gmm_last_error(ctx.get()));
}

struct alignas(256) Block {
    unsigned char bytes[256];
};

// Asks for the workspace of an operation and runs it.
template <class Query, class Run, class Call>
void run(const Context &ctx, Query query, gmm_op op, Run operation, const Call &call) {
    gmm_info info = GMM_ZERO;
    check(ctx, query(ctx.get(), op, &call, &info));
    std::vector<Block> workspace(info.workspace_bytes / sizeof(Block) + 1);
    check(ctx, operation(ctx.get(), &call, workspace.data(), info.workspace_bytes, nullptr));
}

} // namespace

int main() try {
    const int tokens = 4, experts = 3, topk = 2, hidden = 2;
    const std::vector<float> logits = {3, 1, 0, 0, 2, 1, 1, 0, 4, 5, 0, 5}, x = {1, 2, 3, 4, 5, 6, 7, 8};
    std::vector<float> probs(tokens * topk), rows(tokens * topk * hidden), out(tokens * hidden);
    std::vector<int32_t> indices(tokens * topk), counts(experts), row_of(tokens * topk), slot_of(tokens * topk);
    std::vector<int32_t> sizes(experts);
    const Context ctx = make_context();

    const gmm_mat mlogits = gmm_mat_packed(GMM_F32, logits.data()), mx = gmm_mat_packed(GMM_F32, x.data());
    const gmm_mat mrows = gmm_mat_packed(GMM_F32, rows.data()), mout = gmm_mat_packed(GMM_F32, out.data());
    gmm_route route = GMM_ZERO;
    route.experts = experts;
    route.tokens = tokens;
    route.topk = topk;
    route.normalize = 1;
    route.logits = &mlogits;
    route.indices = indices.data();
    route.probs = probs.data();
    route.counts = counts.data();
    run(ctx, gmm_topk_query, GMM_OP_TOPK_FWD, gmm_topk_fwd, route);

    gmm_permute map = GMM_ZERO; // what all calls share; each takes the operands that its contract lists, and no others
    map.experts = experts;
    map.tokens = tokens;
    map.capacity = tokens * topk;
    map.hidden = hidden;
    map.topk = topk;
    map.indices = indices.data();
    map.row_of = row_of.data();
    map.slot_of = slot_of.data();
    map.sizes = sizes.data();
    run(ctx, gmm_permute_query, GMM_OP_PERMUTE_MAP, gmm_permute_map, map);

    gmm_permute permute = map;
    permute.x = &mx;
    permute.rows = &mrows;
    run(ctx, gmm_permute_query, GMM_OP_PERMUTE_FWD, gmm_permute_fwd, permute);

    gmm_permute combine = map;
    combine.probs = probs.data();
    combine.rows = &mrows;
    combine.out = &mout;
    run(ctx, gmm_permute_query, GMM_OP_UNPERMUTE_FWD, gmm_unpermute_fwd, combine);

    float worst = 0.0f;
    for (size_t i = 0; i < x.size(); i++) worst = std::fmax(worst, std::fabs(out[i] - x[i]));
    std::printf("tokens per expert: %d %d %d; largest difference after the round trip: %g\n", sizes[0], sizes[1],
                sizes[2], static_cast<double>(worst));
    return worst < 1e-5f ? 0 : 1;
} catch (const std::exception &e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
}
