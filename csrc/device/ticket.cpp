#include "device/ticket.h"

#include <atomic>
#include <chrono>

namespace ridgeline::device {

unsigned long long new_ticket() {
  static std::atomic<unsigned long long> count{static_cast<unsigned long long>(
      std::chrono::steady_clock::now().time_since_epoch().count())};
  unsigned long long x = (count += 0x9e3779b97f4a7c15ull);  // splitmix64
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return (x ^ (x >> 31)) | 1;  // never 0: so a closed queue is signed
}

}  // namespace ridgeline::device
