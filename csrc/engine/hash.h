#pragma once
#include <cstdint>
#include <span>
#include <string_view>

namespace ridgeline::engine {

struct Hash128 {
  std::uint64_t lo = 0, hi = 0;
  bool operator==(const Hash128&) const = default;
};

/// The seeded hash of a tenant's name: the root of its chains.
Hash128 hash_tenant(std::uint64_t seed, std::string_view tenant);

/// The hash of a block of tokens that follows `parent`: it depends on everything before it.
Hash128 hash_block(const Hash128& parent, std::span<const std::int32_t> tokens);

}  // namespace ridgeline::engine
