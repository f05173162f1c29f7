#include "cpu/parallel.h"

namespace ridgeline::cpu {
namespace {
ParallelFor g_pool = nullptr;  // set once, while the module loads
}

void set_parallel_for(ParallelFor pool) { g_pool = pool; }
ParallelFor installed_parallel_for() { return g_pool; }

}  // namespace ridgeline::cpu
