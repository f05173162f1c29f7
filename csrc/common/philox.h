#pragma once
#include <array>
#include <cstdint>

namespace ridgeline {

/// The high 64 bits of a 128-bit product: with a uniform `random`, a uniform integer below `range`
/// (Lemire, "Fast Random Integer Generation in an Interval", 2019, without the rejection: the bias
/// is below range / 2^64).
constexpr std::uint64_t scale_random(std::uint64_t random, std::uint64_t range) {
  const std::uint64_t a = random >> 32, b = random & 0xffffffffu;
  const std::uint64_t c = range >> 32, d = range & 0xffffffffu;
  const std::uint64_t middle = a * d + ((b * d) >> 32);
  const std::uint64_t other = b * c + (middle & 0xffffffffu);
  return a * c + (middle >> 32) + (other >> 32);
}

/// Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011): four random
/// words as a pure function of key and counter, the same on the host and on the device.
constexpr std::array<std::uint32_t, 4> philox(std::array<std::uint32_t, 4> counter,
                                              std::uint64_t key) {
  auto key0 = static_cast<std::uint32_t>(key), key1 = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = std::uint64_t{0xD2511F53u} * counter[0];
    const std::uint64_t p1 = std::uint64_t{0xCD9E8D57u} * counter[2];
    counter = {static_cast<std::uint32_t>(p1 >> 32) ^ counter[1] ^ key0,
               static_cast<std::uint32_t>(p1),
               static_cast<std::uint32_t>(p0 >> 32) ^ counter[3] ^ key1,
               static_cast<std::uint32_t>(p0)};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

/// The 64 random bits of one (seed, position): a token's draw depends on nothing else.
constexpr std::uint64_t random_bits(std::uint64_t seed, std::uint64_t position) {
  const auto words = philox({static_cast<std::uint32_t>(position),
                             static_cast<std::uint32_t>(position >> 32), 0, 0},
                            seed);
  return (std::uint64_t{words[1]} << 32) | words[0];
}

}  // namespace ridgeline
