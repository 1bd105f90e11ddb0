// cpp/gmm.hpp: contexts and workspaces that free themselves, operands as values, errors as exceptions. An expert MLP in
// two micro-batches, whose weight gradients add up; each is checked against a finite difference.
#define GMM_IMPLEMENTATION
#include "cpp/gmm.hpp"

#include <cmath>
#include <cstdio>
#include <vector>

namespace {

constexpr int experts = 3, rows = 20, hidden = 8, ffn = 6;

std::vector<float> draw(int n, unsigned seed) {
    std::vector<float> v(static_cast<size_t>(n));
    for (float &value : v) {
        seed = seed * 1664525u + 1013904223u;
        value = static_cast<float>(seed >> 8) / 8388608.0f - 1.0f;
    }
    return v;
}

double sum_of(const std::vector<float> &y) {
    double sum = 0.0;
    for (const float value : y) sum += static_cast<double>(value);
    return sum;
}

int train() {
    const int32_t counts[experts] = {7, 0, 13};
    const std::vector<float> x = draw(rows * hidden, 1), ones(rows * hidden, 1.0f);
    std::vector<float> w1 = draw(experts * 2 * ffn * hidden, 2), w2 = draw(experts * hidden * ffn, 3);
    std::vector<float> y(rows * hidden), dx(y), dw1(w1.size(), 0.0f), dw2(w2.size(), 0.0f);

    gmm::Context ctx; // the CPU
    gmm::Workspace workspace(ctx);
    gmm::Memory saved(ctx);
    gmm::Mlp mlp;
    mlp.config.hidden = hidden, mlp.config.ffn = ffn, mlp.config.act = gmm_act_of(GMM_ACT_PRESET_SWIGLU);
    mlp.groups = gmm::sizes(counts, experts, rows);
    mlp.x = gmm::mat(x.data()), mlp.w1 = gmm::mat(w1.data()), mlp.w2 = gmm::mat(w2.data());
    mlp.y = gmm::mat(y.data()), mlp.dy = gmm::mat(ones.data()), mlp.dx = gmm::mat(dx.data());
    mlp.dw1 = {gmm::mat(dw1.data()), true}, mlp.dw2 = {gmm::mat(dw2.data()), true}; // add
    for (int micro_batch = 0; micro_batch < 2; micro_batch++) {
        mlp.fwd(workspace, saved);
        mlp.bwd(workspace, saved);
    }

    int wrong = 0;
    for (const size_t at : {size_t{3}, w2.size() - 1}) { // experts 0 and 2
        const float old = w2[at], step = 0.01f;
        w2[at] = old + step;
        mlp.infer(workspace);
        double slope = sum_of(y);
        w2[at] = old - step;
        mlp.infer(workspace);
        slope = 2.0 * (slope - sum_of(y)) / (2.0 * static_cast<double>(step));
        w2[at] = old;
        std::printf("d loss / d w2[%zu]: %.5f, finite difference %.5f\n", at, static_cast<double>(dw2[at]), slope);
        wrong += !(std::fabs(slope - static_cast<double>(dw2[at])) < 1e-2 * std::fabs(slope));
    }
    try {
        gmm::Linear lin;
        lin.in_features = hidden, lin.out_features = ffn, lin.groups = mlp.groups;
        lin.x = gmm::mat(x.data()), lin.w = gmm::mat(w1.data()); // no y
        lin.fwd(workspace);
        wrong++;
    } catch (const gmm::Error &e) {
        std::printf("refused: %s\n", e.what());
        wrong += e.status != GMM_E_NULL;
    }
    return wrong;
}

} // namespace

int main() {
    try {
        return train();
    } catch (const gmm::Error &e) {
        std::fprintf(stderr, "%s\n", e.what());
        return 1;
    }
}
