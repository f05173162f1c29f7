#pragma once

namespace ridgeline::device {

/// What signs what blocks leave for each other in memory of any contents: a number that it is not
/// likely to hold by chance, another one each time. Not in a kernel file: <atomic> and <chrono>
/// cost each 3 s of compile time.
unsigned long long new_ticket();

}  // namespace ridgeline::device
