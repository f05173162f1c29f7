// The module _C. The submodule _C.engine is bound here, without a torch header; the operators are
// registered by static initialisers in the other files of this shared object, so importing the
// module is all they need.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/fair_lock.h"
#include "common/check.h"
#include "engine/batch.h"
#include "engine/block_manager.h"
#include "engine/scheduler.h"

namespace py = pybind11;
using namespace py::literals;

namespace ridgeline::engine {
namespace {

using Ids = std::vector<std::int64_t>;
using AttentionCosts = std::vector<std::tuple<std::int64_t, double, double>>;

const char* finish_name(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop: return "stop";
    case FinishReason::kLength: return "length";
    case FinishReason::kAbort: return "abort";
    case FinishReason::kDeadline: return "deadline";
  }
  return "";
}

FinishReason outside_reason(const std::string& name) {
  check(name == "abort" || name == "stop", "reason must be 'abort' or 'stop', got '", name, "'");
  return name == "stop" ? FinishReason::kStop : FinishReason::kAbort;
}

std::vector<std::int32_t> int32s(const Ids& ids, const char* name) {
  std::vector<std::int32_t> narrow;
  narrow.reserve(ids.size());
  for (const std::int64_t id : ids) narrow.push_back(checked_int32(id, name));
  return narrow;
}

std::vector<std::pair<BlockId, BlockId>> pairs(const std::vector<BlockCopy>& copies) {
  std::vector<std::pair<BlockId, BlockId>> pairs;
  for (const auto& [source, destination] : copies) pairs.emplace_back(source, destination);
  return pairs;
}

// ---- Batch and arena ---------------------------------------------------------------------------

py::dict offsets(const Arena& arena) {
  py::dict offsets;
  for (std::size_t i = 0; i < kSections; ++i)
    offsets[kSectionNames[i]] = py::make_tuple(arena.sections[i].offset, arena.sections[i].length);
  return offsets;
}

std::int32_t section_length(const Arena& arena, Section section) {
  return arena.sections[static_cast<std::size_t>(section)].length;
}

void bind_batch(py::module_& m) {
  py::class_<Arena>(m, "Arena", py::buffer_protocol())
      .def_buffer([](Arena& arena) {
        return py::buffer_info(arena.data.data(), static_cast<py::ssize_t>(arena.data.size()));
      })
      .def("__len__", [](const Arena& arena) { return arena.data.size(); })
      .def_property_readonly("offsets", &offsets)
      .def_readonly("num_tokens", &Arena::num_tokens)
      .def_readonly("num_seqs", &Arena::num_seqs)
      .def_readonly("num_rows", &Arena::num_rows)
      .def_property_readonly(
          "num_table_updates",
          [](const Arena& arena) { return section_length(arena, Section::kTableUpdates) / 3; })
      .def_property_readonly(
          "num_copies", [](const Arena& a) { return section_length(a, Section::kCopies) / 2; });

  py::class_<Batch, std::shared_ptr<Batch>>(m, "Batch")
      .def_readonly("step", &Batch::step)
      .def_property_readonly("num_tokens", &Batch::num_tokens)
      .def_property_readonly("num_seqs", &Batch::num_seqs)
      .def_property_readonly("num_rows", &Batch::num_rows)
      .def_readonly("num_decode_tokens", &Batch::num_decode_tokens)
      .def_readonly("max_q", &Batch::max_q)
      .def_readonly("shared_blocks", &Batch::shared_blocks)
      .def_readonly("padded_tokens", &Batch::padded_tokens)
      .def_readonly("predicted_us", &Batch::predicted_us)
      .def_readonly("read_us", &Batch::read_us)
      .def_readonly("compute_us", &Batch::compute_us)
      .def_property_readonly("swap_outs", [](const Batch& b) { return pairs(b.swap_outs); })
      .def_property_readonly("swap_ins", [](const Batch& b) { return pairs(b.swap_ins); })
      .def("digest", &Batch::digest)
      .def_property_readonly("max_seq_len", &Batch::max_seq_len)
      .def_readonly("seq_ids", &Batch::seq_ids)
      .def_readonly("row_seq_ids", &Batch::row_seq_ids)
      .def_readonly("row_positions", &Batch::row_positions)
      .def("arena", &Batch::arena, "tokens"_a = 0, "seqs"_a = 0, "rows"_a = 0);
}

// ---- Scheduler ---------------------------------------------------------------------------------

void bind_records(py::module_& m) {
  py::enum_<Reason>(m, "Reason")
      .value("ADMITTED", Reason::kAdmitted)
      .value("CHUNKED", Reason::kChunked)
      .value("CHUNKED_LATENCY", Reason::kChunkedLatency)
      .value("HELD_TOKENS", Reason::kHeldTokens)
      .value("HELD_LATENCY", Reason::kHeldLatency)
      .value("HELD_BLOCKS", Reason::kHeldBlocks)
      .value("HELD_SEQUENCES", Reason::kHeldSequences)
      .value("HELD_PREFIX_IN_FLIGHT", Reason::kHeldPrefixInFlight)
      .value("PREEMPTED", Reason::kPreempted)
      .value("SWAPPED_OUT", Reason::kSwappedOut)
      .value("SWAPPED_IN", Reason::kSwappedIn)
      .value("EVICTED", Reason::kEvicted)
      .value("PREFIX_DIFFERS", Reason::kPrefixDiffers)
      .value("PREFIX_EVICTED", Reason::kPrefixEvicted)
      .value("PREFIX_SHORT", Reason::kPrefixShort)
      .value("FORKED", Reason::kForked)
      .value("FINISHED", Reason::kFinished);

  py::class_<Decision>(m, "Decision")
      .def_readonly("index", &Decision::index)
      .def_readonly("step", &Decision::step)
      .def_readonly("seq_id", &Decision::seq_id)
      .def_readonly("reason", &Decision::reason)
      .def_readonly("a", &Decision::a)
      .def_readonly("b", &Decision::b)
      .def("__repr__", [](const Decision& d) {
        std::ostringstream text;
        text << "<step " << d.step << ": sequence " << d.seq_id << " "
             << py::cast<std::string>(py::cast(d.reason).attr("name")) << " " << d.a << " " << d.b
             << ">";
        return text.str();
      });

  py::class_<Stats>(m, "Stats")
      .def_readonly("total_blocks", &Stats::total_blocks)
      .def_readonly("free_blocks", &Stats::free_blocks)
      .def_readonly("cached_blocks", &Stats::cached_blocks)
      .def_readonly("used_blocks", &Stats::used_blocks)
      .def_readonly("waiting", &Stats::waiting)
      .def_readonly("running", &Stats::running)
      .def_readonly("in_flight", &Stats::in_flight)
      .def_readonly("steps", &Stats::steps)
      .def_readonly("prefix_query_tokens", &Stats::prefix_query_tokens)
      .def_readonly("prefix_hit_tokens", &Stats::prefix_hit_tokens)
      .def_readonly("preemptions", &Stats::preemptions)
      .def_readonly("swaps", &Stats::swaps)
      .def_readonly("evictions", &Stats::evictions)
      .def_readonly("copies", &Stats::copies);
}

StepCost make_step_cost(double fixed_us, double token_us, double row_us, double swap_us,
                        const AttentionCosts& costs, const Ids& sizes, std::int64_t sized_seqs) {
  StepCost cost{.fixed_us = fixed_us, .token_us = token_us, .row_us = row_us,
                .swap_us = swap_us, .sizes = sizes, .sized_seqs = sized_seqs};
  for (const auto& [window, key_us, pair_us] : costs)
    cost.attention.push_back({.window = window, .key_us = key_us, .pair_us = pair_us});
  return cost;
}

std::unique_ptr<Scheduler> make_scheduler(
    std::int64_t num_blocks, std::int64_t block_size, std::int64_t max_model_len,
    std::int64_t vocab_size, std::int64_t max_num_seqs, std::int64_t max_num_batched_tokens,
    const Ids& eos_token_ids, bool enable_prefix_caching, std::int64_t seed,
    std::int64_t decision_log_size, std::int64_t num_host_blocks, std::int64_t latency_target_us,
    const StepCost& cost) {
  return std::make_unique<Scheduler>(SchedulerConfig{
      .num_blocks = num_blocks,
      .block_size = block_size,
      .max_model_len = max_model_len,
      .vocab_size = vocab_size,
      .max_num_seqs = max_num_seqs,
      .max_num_batched_tokens = max_num_batched_tokens,
      .eos_token_ids = eos_token_ids,
      .enable_prefix_caching = enable_prefix_caching,
      .seed = static_cast<std::uint64_t>(seed),
      .decision_log_size = decision_log_size,
      .num_host_blocks = num_host_blocks,
      .latency_target_us = latency_target_us,
      .cost = cost});
}

void add(Scheduler& scheduler, const Ids& seq_ids, const Ids& prompt, std::int64_t max_tokens,
         std::int64_t min_tokens, const Ids& stop_token_ids, bool ignore_eos,
         std::int64_t priority, const std::string& tenant, bool prompt_logprobs, std::int64_t now,
         std::optional<std::int64_t> deadline) {
  scheduler.add({.seq_ids = seq_ids,
                 .prompt = prompt,
                 .max_tokens = max_tokens,
                 .min_tokens = min_tokens,
                 .stop_token_ids = stop_token_ids,
                 .ignore_eos = ignore_eos,
                 .priority = priority,
                 .now = now,
                 .deadline = deadline.value_or(kNoDeadline),
                 .tenant = tenant,
                 .prompt_logprobs = prompt_logprobs});
}

/// Plain tuples: 256 bound objects and their attributes cost a step 100 us of the interpreter.
py::list append_tuples(py::list list, const std::vector<Output>& outputs) {
  for (const auto& [seq_id, token, row, reason] : outputs) {
    py::object name = py::none();
    if (reason) name = py::str(finish_name(*reason));
    list.append(py::make_tuple(seq_id, token, row, std::move(name)));
  }
  return list;
}

// No call releases the GIL: a step takes microseconds, and the GIL is the scheduler's only lock.
void bind_scheduler(py::module_& m) {
  py::class_<StepCost>(m, "StepCost")
      .def(py::init(&make_step_cost), py::kw_only(), "fixed_us"_a = 0.0, "token_us"_a = 0.0,
           "row_us"_a = 0.0, "swap_us"_a = 0.0, "attention"_a = AttentionCosts{},
           "sizes"_a = Ids{}, "sized_seqs"_a = StepCost{}.sized_seqs);
  py::class_<Scheduler>(m, "Scheduler")
      .def(py::init(&make_scheduler), py::kw_only(), "num_blocks"_a, "block_size"_a,
           "max_model_len"_a, "vocab_size"_a, "max_num_seqs"_a = 256,
           "max_num_batched_tokens"_a = 8192, "eos_token_ids"_a = Ids{},
           "enable_prefix_caching"_a = true, "seed"_a = 0, "decision_log_size"_a = 4096,
           "num_host_blocks"_a = 0, "latency_target_us"_a = 0, "cost"_a = StepCost{})
      .def("add", &add, "seq_ids"_a, "prompt"_a, py::kw_only(), "max_tokens"_a,
           "min_tokens"_a = 0, "stop_token_ids"_a = Ids{}, "ignore_eos"_a = false,
           "priority"_a = 0, "tenant"_a = "", "prompt_logprobs"_a = false, "now"_a = 0,
           "deadline"_a = py::none())
      // The holder is of a mutable Batch; nothing that is bound mutates it.
      .def("schedule",
           [](Scheduler& s, std::int64_t now, const Ids& only) {
             return std::const_pointer_cast<Batch>(s.schedule(now, only));
           },
           "now"_a = 0, "only"_a = Ids{})
      .def("take_expired", &Scheduler::take_expired)
      .def("add_time_ratio", &Scheduler::add_time_ratio, "padded_tokens"_a, "ratio"_a)
      .def("commit",
           [](Scheduler& s, const Batch& batch, const Ids& tokens, std::optional<py::list> into) {
             return append_tuples(into ? *into : py::list(), s.commit(batch, tokens));
           },
           "batch"_a, "tokens"_a, "into"_a = py::none())
      .def("finish",
           [](Scheduler& s, std::int64_t seq_id, const std::string& reason) {
             s.finish(seq_id, outside_reason(reason));
           },
           "seq_id"_a, "reason"_a = "abort")
      .def("discard", &Scheduler::discard)
      .def("has_unfinished", &Scheduler::has_unfinished)
      .def("num_in_flight", &Scheduler::num_in_flight)
      .def("state", &Scheduler::state, "seq_id"_a)
      .def("block_table", &Scheduler::block_table, "seq_id"_a)
      .def("stats", &Scheduler::stats)
      .def("decisions", &Scheduler::decisions, "since"_a = 0)
      .def("check_invariants", &Scheduler::check_invariants)
      .def_property_readonly("max_blocks_per_seq", &Scheduler::max_blocks_per_seq);
}

// ---- Block manager -----------------------------------------------------------------------------

std::unique_ptr<BlockManager> make_block_manager(std::int64_t num_blocks, std::int64_t block_size,
                                                 std::int64_t max_tables,
                                                 bool enable_prefix_caching, std::int64_t seed) {
  return std::make_unique<BlockManager>(
      BlockManagerConfig{.num_blocks = num_blocks,
                         .block_size = block_size,
                         .max_tables = max_tables,
                         .enable_prefix_caching = enable_prefix_caching,
                         .seed = static_cast<std::uint64_t>(seed)});
}

std::int64_t adopt(BlockManager& manager, TableId table, const Ids& tokens) {
  HashChain chain = manager.chain(table);
  const PrefixMatch match = manager.match(chain, int32s(tokens, "tokens"));
  manager.adopt(table, match);
  return static_cast<std::int64_t>(match.blocks.size()) * manager.block_size();
}

void bind_block_manager(py::module_& m) {
  py::class_<BlockManager>(m, "BlockManager")
      .def(py::init(&make_block_manager), py::kw_only(), "num_blocks"_a, "block_size"_a,
           "max_tables"_a = 256, "enable_prefix_caching"_a = true, "seed"_a = 0)
      .def("open",
           [](BlockManager& b, const std::string& tenant) {
             return b.open(b.chain(tenant).tenant);
           },
           "tenant"_a = "")
      .def("close", &BlockManager::close, "table"_a)
      .def("fork", &BlockManager::fork, "table"_a)
      .def("prepare_write", &BlockManager::prepare_write, "table"_a, "start"_a, "end"_a)
      .def("take_copies",
           [](BlockManager& b) { return pairs(b.take_copies()); })
      .def("match",
           [](const BlockManager& b, const Ids& tokens, const std::string& tenant) {
             HashChain chain = b.chain(tenant);
             return b.match(chain, int32s(tokens, "tokens")).blocks;
           },
           "tokens"_a, "tenant"_a = "")
      .def("adopt", &adopt, "table"_a, "tokens"_a)
      .def("register",
           [](BlockManager& b, TableId table, const Ids& tokens) {
             HashChain chain = b.chain(table);
             b.register_full(table, chain, int32s(tokens, "tokens"));
           },
           "table"_a, "tokens"_a)
      .def("blocks", &BlockManager::blocks, "table"_a)
      .def("refcount",
           [](const BlockManager& b, std::int64_t block) {
             check(0 <= block && block < b.num_blocks(), "block must be from 0 to ",
                   b.num_blocks() - 1, ", got ", block);
             return b.refcount(static_cast<BlockId>(block));
           },
           "block"_a)
      .def_property_readonly("num_free", &BlockManager::num_free)
      .def_property_readonly("num_cached", &BlockManager::num_cached)
      .def_property_readonly("num_used", &BlockManager::num_used)
      .def_property_readonly("evictions", &BlockManager::evictions)
      .def("check_invariants", &BlockManager::check_invariants);
}

}  // namespace

void bind(py::module_ m) {
  m.doc() = "Block manager and scheduler: what each step of inference computes, without tensors.";
  bind_batch(m);
  bind_records(m);
  bind_scheduler(m);
  bind_block_manager(m);
}

}  // namespace ridgeline::engine

PYBIND11_MODULE(_C, m) {
  m.doc() = "The compiled core of ridgeline.";
  ridgeline::engine::bind(m.def_submodule("engine"));
  py::class_<ridgeline::FairLock>(m, "FairLock")
      .def(py::init())
      .def("__enter__", &ridgeline::FairLock::enter)
      .def("__exit__", [](ridgeline::FairLock& lock, const py::args&) { lock.exit(); })
      .def_property_readonly("waiting", &ridgeline::FairLock::waiting);
}
