// Checksums of odd sizes in memory that ends where they do, by one thread and by several: the same.

#include <cstdint>
#include <cstdio>
#include <vector>

extern "C" void samovar_layer_sums(const uint8_t*, long, long, long, const uint64_t*, uint64_t*, long);

int main() {
    for (long bytes : {1l, 7l, 8l, 33l, 4095l, 4096l, 4100l, 70001l}) {
        const long blocks = 3, layers = 5;
        std::vector<uint8_t> payload(blocks * layers * bytes);
        for (size_t at = 0; at < payload.size(); ++at) payload[at] = static_cast<uint8_t>(at * 7);
        const std::vector<uint64_t> seeds{1, 2, ~uint64_t{0}};
        std::vector<uint64_t> alone(blocks * layers), together(blocks * layers);
        samovar_layer_sums(payload.data(), blocks, layers, bytes, seeds.data(), alone.data(), 1);
        for (long threads : {2l, 4l, 40l}) {
            samovar_layer_sums(payload.data(), blocks, layers, bytes, seeds.data(), together.data(), threads);
            if (alone != together) return 1;
        }
    }
    std::puts("the same");
}
