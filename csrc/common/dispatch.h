#pragma once
#include <type_traits>

#include "common/check.h"

namespace ridgeline {

template <int N>
using Int = std::integral_constant<int, N>;

template <class T>
struct Type {
  using type = T;
};

/// Calls fn(Int<v>{}) for the first v of Values with value <= v; an error naming `name` if there is
/// none. Values ascend.
template <int... Values, class Fn>
void dispatch_at_least(int value, const char* name, Fn&& fn) {
  const bool found = ((value <= Values && (fn(Int<Values>{}), true)) || ...);
  constexpr int kValues[] = {Values...};
  check(found, name, " is ", value, ", the largest covered is ", kValues[sizeof...(Values) - 1]);
}

/// Calls fn(std::true_type) or fn(std::false_type).
template <class Fn>
void dispatch_bool(bool value, Fn&& fn) {
  if (value) {
    fn(std::true_type{});
  } else {
    fn(std::false_type{});
  }
}

}  // namespace ridgeline
