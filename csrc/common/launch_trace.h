#pragma once
#include <string>

/// What an op would launch, told instead of done: the source of `ridgeline.explain`. While a trace
/// is open on a thread, that thread's ops check, choose and allocate as ever and launch nothing.
/// One record a line, fields parted by tabs: see ridgeline/_explain.py, which reads them.
namespace ridgeline::launch_trace {

inline thread_local std::string* open = nullptr;  // null: launches are real

inline bool is_open() { return open != nullptr; }

/// A choice, in words: what was cut how. `text()` is called only while a trace is open.
template <class Text>
void note_choice(Text&& text) {
  if (is_open()) open->append("choice\t").append(text()).append("\n");
}

/// Why a slower kernel stands in for a faster one.
template <class Text>
void note_slower(Text&& text) {
  if (is_open()) open->append("slower\t").append(text()).append("\n");
}

}  // namespace ridgeline::launch_trace
