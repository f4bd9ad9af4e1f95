// A C++17 user of the installed library: the same as consumer.c, with owners instead of calls that give back.
// Prints the version of the library; ends with 0.
#include <cstdint>
#include <cstring>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <stagehand/stagehand.h>

namespace {

void check(sth_status status) {
    if (status != STH_OK) throw std::runtime_error(sth_last_error()->message);
}

template <class T, void (*give_back)(T *)> struct closer {
    void operator()(T *object) const { give_back(object); }
};
using device_owner = std::unique_ptr<sth_device, closer<sth_device, sth_device_close>>;
using runtime_owner = std::unique_ptr<sth_runtime, closer<sth_runtime, sth_runtime_destroy>>;
using weights_list = std::vector<std::vector<unsigned char>>;

device_owner open_device(const char *name) {
    sth_device *device = nullptr;
    check(sth_device_open(name, nullptr, &device));
    return device_owner(device);
}

runtime_owner make_runtime(sth_device *device, const weights_list &weights, std::uint64_t budget) {
    sth_runtime_options options;
    sth_runtime_options_init(&options);
    options.budget = budget;
    sth_runtime *made = nullptr;
    check(sth_runtime_create(device, &options, &made));
    runtime_owner runtime(made);
    for (const auto &bytes : weights) {
        sth_unit_desc desc{};
        const std::string name = "unit " + std::to_string(bytes[0]);
        desc.name = name.c_str();
        desc.bytes = bytes.size();
        desc.host = bytes.data();
        std::uint32_t unit;
        check(sth_runtime_add_unit(runtime.get(), &desc, &unit));
    }
    check(sth_runtime_seal(runtime.get()));
    return runtime;
}

// On the simulated device an address is one of the host.
void one_step(sth_runtime *runtime, const weights_list &weights) {
    check(sth_step_begin(runtime));
    for (std::uint32_t unit = 0; unit < weights.size(); unit++) {
        sth_lease lease;
        check(sth_unit_acquire(runtime, unit, 0, &lease));
        const void *there = reinterpret_cast<const void *>(static_cast<std::uintptr_t>(lease.address));
        const bool same = std::memcmp(there, weights[unit].data(), weights[unit].size()) == 0;
        sth_lease_release(runtime, &lease);
        if (!same) throw std::runtime_error("a unit's bytes are not those of its image");
    }
    check(sth_step_end(runtime));
}

} // namespace

int main() try {
    weights_list weights; // outlives the runtime, which reads it
    for (int i = 0; i < 8; i++) weights.emplace_back(65536, static_cast<unsigned char>(i + 1));
    const device_owner device = open_device("sim");
    const runtime_owner runtime = make_runtime(device.get(), weights, 3 * 65536);
    for (int step = 0; step < 3; step++) one_step(runtime.get(), weights);
    std::cout << sth_version() << '\n';
    return 0;
} catch (const std::exception &error) {
    std::cerr << error.what() << '\n';
    return 1;
}
