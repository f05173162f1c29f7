#pragma once
#include <cstdio>
#include <exception>
#include <functional>
#include <initializer_list>
#include <source_location>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

namespace ridgeline::testing {

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void fail(const std::string& what, std::source_location where) {
  throw Failure(std::string(where.file_name()) + ":" + std::to_string(where.line()) + ": " + what);
}

inline void expect(bool holds, std::string_view what = "expectation failed",
                   std::source_location where = std::source_location::current()) {
  if (!holds) fail(std::string(what), where);
}

template <class A, class B>
void expect_equal(const A& actual, const B& expected,
                  std::source_location where = std::source_location::current()) {
  if (actual == expected) return;
  std::ostringstream text;
  const auto print = [&](const auto& value) {
    if constexpr (requires { text << value; }) {
      text << value;
    } else if constexpr (requires { text << *value.begin(); }) {
      for (const auto& element : value) text << element << ' ';
    } else {
      text << "(not printable)";
    }
  };
  text << "expected ";
  print(expected);
  text << ", got ";
  print(actual);
  fail(text.str(), where);
}

/// Expects std::invalid_argument with `part` in its message.
inline void expect_error(const std::function<void()>& action, std::string_view part,
                         std::source_location where = std::source_location::current()) {
  try {
    action();
  } catch (const std::invalid_argument& error) {
    if (std::string_view(error.what()).find(part) == std::string_view::npos)
      fail("expected \"" + std::string(part) + "\" in the error, got: " + error.what(), where);
    return;
  }
  fail("expected an error with \"" + std::string(part) + "\", got none", where);
}

struct Test {
  const char* name;
  void (*body)();
};

/// Runs the tests; the exit status of main.
inline int run(std::initializer_list<Test> tests) {
  int failures = 0;
  for (const Test& test : tests) try {
      test.body();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "FAILED %s\n  %s\n", test.name, error.what());
      ++failures;
    }
  std::printf("%zu tests, %d failed\n", tests.size(), failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace ridgeline::testing
