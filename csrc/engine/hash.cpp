#include "engine/hash.h"

namespace ridgeline::engine {
namespace {

/// The finaliser of splitmix64: a bijection in which every input bit reaches every output bit.
std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/// Two lanes with unrelated states. Each step is a bijection of the lane for a given word, so
/// without the seed nobody can choose words whose states meet.
void absorb(Hash128& state, std::uint64_t word) {
  state.lo = mix(state.lo ^ word);
  state.hi = mix(state.hi ^ word);
}

}  // namespace

Hash128 hash_tenant(std::uint64_t seed, std::string_view tenant) {
  Hash128 state{.lo = mix(seed), .hi = mix(~seed)};
  absorb(state, tenant.size());
  for (const char c : tenant) absorb(state, static_cast<unsigned char>(c));
  return state;
}

Hash128 hash_block(const Hash128& parent, std::span<const std::int32_t> tokens) {
  Hash128 state = parent;
  absorb(state, tokens.size());
  for (std::size_t i = 0; i < tokens.size(); i += 2) {
    const std::uint64_t first = static_cast<std::uint32_t>(tokens[i]);
    const std::uint64_t second =
        i + 1 < tokens.size() ? static_cast<std::uint32_t>(tokens[i + 1]) : 0;
    absorb(state, first | second << 32);
  }
  return state;
}

}  // namespace ridgeline::engine
