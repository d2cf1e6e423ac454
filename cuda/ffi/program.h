// What a call's attributes say: decoded and checked once for a compiled program, with which XLA
// keeps it as the handlers' state. Executions add the buffers.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/operands.h"
#include "core/reduction.h"
#include "xla/ffi/api/ffi.h"

namespace jaxrenaissance {

namespace ffi = xla::ffi;

using Words = ffi::Span<const int64_t>;

constexpr int64_t kMissing = INT64_MIN;

// The integers of all ops; each has some of them.
struct Attributes {
  int64_t members = kMissing;  // the number of states in the batch
  int64_t first_leaf = kMissing;
  int64_t from_arena = kMissing;
  int64_t flag = kMissing;
  int64_t norms = kMissing;
  int64_t weights = kMissing;
  int64_t ema = kMissing;
  int64_t ratios = kMissing;
  int64_t gated = kMissing;
  int64_t direction = kMissing;
  int64_t gradients = kMissing;
  int64_t by_segment = kMissing;
  int64_t trust = kMissing;
  int64_t targets = kMissing;
  int64_t source = kMissing;
  int64_t shards = kMissing;
};

struct AttributeField {
  const char* name;
  int64_t Attributes::* field;
};

inline constexpr AttributeField kAttributeFields[] = {{"members", &Attributes::members},
                                                      {"first_leaf", &Attributes::first_leaf},
                                                      {"from_arena", &Attributes::from_arena},
                                                      {"flag", &Attributes::flag},
                                                      {"norms", &Attributes::norms},
                                                      {"weights", &Attributes::weights},
                                                      {"ema", &Attributes::ema},
                                                      {"ratios", &Attributes::ratios},
                                                      {"gated", &Attributes::gated},
                                                      {"direction", &Attributes::direction},
                                                      {"gradients", &Attributes::gradients},
                                                      {"by_segment", &Attributes::by_segment},
                                                      {"trust", &Attributes::trust},
                                                      {"targets", &Attributes::targets},
                                                      {"source", &Attributes::source},
                                                      {"shards", &Attributes::shards}};

// What a program's first execution finds out of its leaves, whose types XLA does not tell earlier;
// later ones have the same. Several devices may execute a program at once.
class LeafForms {
 public:
  // What make() returned the first time: forms, or what is wrong with the leaves.
  template <typename F>
  const std::vector<LeafForm>& Once(const F& make) const {
    std::call_once(once_, [&] { forms_ = make(error_); });
    return forms_;
  }

  const std::optional<std::string>& error() const { return error_; }

 private:
  mutable std::once_flag once_;
  mutable std::vector<LeafForm> forms_;
  mutable std::optional<std::string> error_;
};

struct Program {
  Attributes attributes;
  std::vector<int64_t> shared;  // after a -1, sorted, the operands that all members share
  bool has_workspaces = false;
  std::vector<int64_t> workspace_segments;  // of each workspace that is an operand

  bool has_layout = false;
  Layout layout{};  // of `segments`
  std::vector<Segment> segments;
  int64_t num_leaves = 0, num_groups = 0;  // that the segments name
  std::vector<int64_t> first_partials;     // the number of each segment's first; then the end

  LeafForms operand_leaves, result_leaves;

  Program() = default;
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  // What is wrong with the attributes, if anything. They are gone afterwards.
  std::optional<std::string> Read(const ffi::Dictionary& all) {
    for (const AttributeField& own : kAttributeFields) {
      if (const auto value = all.get<int64_t>(own.name); value.has_value())
        attributes.*own.field = *value;
    }
    if (attributes.members < 0) return "members is missing or negative";
    if (!ReadWords(all, "shared", shared)) return "attribute shared is missing";
    has_workspaces = ReadWords(all, "segments", workspace_segments);
    std::vector<int64_t> words;
    has_layout = ReadWords(all, "layout", words);
    return has_layout ? ReadLayout(words) : std::nullopt;
  }

 private:
  static bool ReadWords(const ffi::Dictionary& all, const char* name, std::vector<int64_t>& into) {
    const auto words = all.get<Words>(name);
    if (words.has_value()) into.assign(words->begin(), words->end());
    return words.has_value();
  }

  // The arena's size, its type, its segments: each lies in the arena.
  std::optional<std::string> ReadLayout(const std::vector<int64_t>& words) {
    constexpr size_t kHeader = 2, kFields = sizeof(Segment) / sizeof(int64_t);
    constexpr LeafType kTypes[] = {LeafType::kF32, LeafType::kF64, LeafType::kBf16, LeafType::kF16};
    if (words.size() < kHeader || (words.size() - kHeader) % kFields != 0 || words[1] < 0 ||
        words[1] >= kLeafTypes) {
      return "the layout is malformed";
    }
    const int64_t size = words[0];
    const LeafType type = kTypes[words[1]];
    int64_t partials = 0;
    for (size_t i = kHeader; i < words.size(); i += kFields) {
      const Segment segment = {words[i], words[i + 1], words[i + 2], words[i + 3], words[i + 4]};
      if (segment.start < 0 || segment.size <= 0 || segment.start + segment.size > size ||
          segment.leaf < 0 || segment.leaf_offset < 0 || segment.group < 0) {
        return "segment " + std::to_string(segments.size()) + " does not fit the arena";
      }
      segments.push_back(segment);
      first_partials.push_back(partials);
      partials += NumPartials(segment.size);
      num_leaves = std::max(num_leaves, segment.leaf + 1);
      num_groups = std::max(num_groups, segment.group + 1);
    }
    first_partials.push_back(partials);
    layout = {segments.data(),
              static_cast<int64_t>(segments.size()),
              size,
              type,
              type == LeafType::kF64,
              attributes.members};
    return std::nullopt;
  }
};

// The handler of the instantiate stage. P is a backend's Program, with what else it keeps.
template <typename P>
ffi::ErrorOr<std::unique_ptr<P>> Instantiate(ffi::Dictionary attributes) {
  auto program = std::make_unique<P>();
  if (const std::optional<std::string> error = program->Read(attributes))
    return ffi::Unexpected(ffi::Error::InvalidArgument("jaxrenaissance: " + *error));
  program->Prepare();
  return program;
}

inline auto BindInstantiate() { return ffi::Ffi::BindInstantiate().Attrs(); }

}  // namespace jaxrenaissance
