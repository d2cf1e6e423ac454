// From XLA's call frame to operands: the FFI vocabulary that both backends' handlers share.
#pragma once

#include <algorithm>
#include <optional>
#include <string>

#include "core/operands.h"
#include "core/reduction.h"
#include "core/scalars.h"
#include "xla/ffi/api/ffi.h"

namespace jaxrenaissance {

namespace ffi = xla::ffi;

using Words = ffi::Span<const int64_t>;

// Reads the operands and results of one call in order, and remembers the first thing that is wrong.
//
// Attributes of every call: `members`, the number of states in the batch, and `shared`, which
// lists, after a -1, the operands that all members share. Ops on arenas have `layout`: the arena's
// size, whether it is float64, its segments.
class Decoder {
 public:
  Decoder(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
          const ffi::Dictionary& attributes)
      : args_(args),
        rets_(rets),
        attributes_(attributes),
        members_(Attribute<int64_t>("members")),
        shared_(Attribute<Words>("shared")) {}

  bool ok() const { return !error_.has_value(); }
  ffi::Error error() const {
    return ok() ? ffi::Error::Success() : ffi::Error::InvalidArgument(*error_);
  }

  int64_t members() const { return members_; }

  void Require(bool condition, const std::string& message) {
    if (!condition && ok()) error_ = "jaxrenaissance: " + message;
  }

  template <typename T>
  T Attribute(const char* name) {
    const auto value = attributes_.get<T>(name);
    if (value.has_value()) return *value;
    Fail(std::string("attribute ") + name + " is missing");
    return T{};
  }

  // The segments stay where they are: with the compiled program, which outlives the call.
  Layout ReadLayout() {
    constexpr size_t kHeader = 2, kFields = sizeof(Segment) / sizeof(int64_t);
    const Words words = Attribute<Words>("layout");
    if (words.size() < kHeader || (words.size() - kHeader) % kFields != 0) {
      Fail("the layout is malformed");
      return {};
    }
    return {reinterpret_cast<const Segment*>(words.begin() + kHeader),
            static_cast<int64_t>((words.size() - kHeader) / kFields), words[0], words[1] != 0,
            members_};
  }

  struct Arena {
    void* data;
    int64_t stride;  // elements between members; 0 where they share it
  };

  // The next operand as an arena.
  Arena ReadArena(const Layout& layout, const char* name) {
    const bool is_shared = IsShared(next_);
    const std::optional<ffi::AnyBuffer> buffer = Argument(next_++);
    if (!buffer) return {};
    CheckArena(*buffer, is_shared ? 1 : layout.members, layout, name);
    return {buffer->untyped_data(), is_shared ? 0 : layout.size};
  }

  // The next operand as an arena that each member has one of.
  void* ReadWholeArena(const Layout& layout, const char* name) {
    const Arena arena = ReadArena(layout, name);
    Require(arena.stride == layout.size, std::string(name) + " are shared by members");
    return arena.data;
  }

  // The next operand as an arena that result `index` updates in place: XLA has made them one, or
  // has copied before.
  void* ReadInPlaceArena(const Layout& layout, int64_t index, const char* name) {
    void* data = ReadArena(layout, name).data;
    CheckInPlace(index, data, name);
    return data;
  }

  void* ResultArena(const Layout& layout, const char* name) {
    const std::optional<ffi::AnyBuffer> buffer = Output(0);
    if (!buffer) return nullptr;
    CheckArena(*buffer, layout.members, layout, name);
    return buffer->untyped_data();
  }

  Floats ReadFloats() {
    const bool is_shared = IsShared(next_);
    const std::optional<ffi::AnyBuffer> buffer = Argument(next_++);
    if (!buffer) return {};
    const int64_t sharers = is_shared ? 1 : std::max<int64_t>(members(), 1);
    const int64_t count = static_cast<int64_t>(buffer->element_count()) / sharers;
    const bool is_double = buffer->element_type() == ffi::DataType::F64;
    Require(is_double || buffer->element_type() == ffi::DataType::F32,
            "floats are not float32 or float64");
    Require(count >= kHeader && (count - kHeader) % kRow == 0, "floats are not a header and rows");
    return {buffer->untyped_data(), is_shared ? 0 : count, is_double, (count - kHeader) / kRow};
  }

  int32_t* ReadInPlaceInts(int64_t index) {
    const std::optional<ffi::AnyBuffer> buffer = Argument(next_++);
    if (!buffer) return nullptr;
    if (buffer->element_type() != ffi::DataType::S32 ||
        static_cast<int64_t>(buffer->element_count()) != members() * kInts) {
      Fail("ints are not int32 counters");
    }
    CheckInPlace(index, buffer->untyped_data(), "ints");
    return static_cast<int32_t*>(buffer->untyped_data());
  }

  // Result `index` as a workspace for the partials of a layout.
  Workspace ResultWorkspace(const Layout& layout, int64_t index) {
    Workspace workspace{nullptr, 0, layout.num_segments, 0};
    for (int64_t i = 0; i < layout.num_segments; ++i)
      workspace.num_partials += NumPartials(layout.segments[i].size);
    workspace.stride = PartialsStart(workspace.num_segments) + 2 * workspace.num_partials;
    const std::optional<ffi::AnyBuffer> buffer = Output(index);
    if (!buffer) return {};
    if (buffer->element_type() != ffi::DataType::S32 ||
        static_cast<int64_t>(buffer->element_count()) != members() * workspace.stride) {
      Fail("the workspace has another size or type than the layout wants");
    }
    workspace.data = static_cast<int32_t*>(buffer->untyped_data());
    return workspace;
  }

  // The next operand as a workspace of so many segments that result `index` updates in place.
  Workspace ReadInPlaceWorkspace(int64_t num_segments, int64_t index) {
    const std::optional<ffi::AnyBuffer> buffer = Argument(next_++);
    if (!buffer) return {};
    Workspace workspace{static_cast<int32_t*>(buffer->untyped_data()), 0, num_segments, 0};
    workspace.stride =
        static_cast<int64_t>(buffer->element_count()) / std::max<int64_t>(members(), 1);
    workspace.num_partials = (workspace.stride - PartialsStart(num_segments)) / 2;
    if (buffer->element_type() != ffi::DataType::S32 || num_segments < 0 ||
        (members() > 0 && workspace.num_partials < num_segments)) {
      Fail("a workspace has another size or type than its segments want");
    }
    CheckInPlace(index, workspace.data, "a workspace");
    return workspace;
  }

  // Result `index` as one number a segment, of the scalars' type.
  void* ResultBySegment(int64_t num_segments, bool is_double, int64_t index) {
    const std::optional<ffi::AnyBuffer> buffer = Output(index);
    if (!buffer) return nullptr;
    if (buffer->element_type() != (is_double ? ffi::DataType::F64 : ffi::DataType::F32) ||
        static_cast<int64_t>(buffer->element_count()) != members() * num_segments) {
      Fail("norms by segment have another size or type than the segments");
    }
    return buffer->untyped_data();
  }

  // The next operand as one number a segment, of the scalars' type.
  Floats ReadBySegment(const Layout& layout, bool is_double) {
    const bool is_shared = IsShared(next_);
    const std::optional<ffi::AnyBuffer> buffer = Argument(next_++);
    if (!buffer) return {};
    const int64_t sharers = is_shared ? 1 : members();
    if (buffer->element_type() != (is_double ? ffi::DataType::F64 : ffi::DataType::F32) ||
        static_cast<int64_t>(buffer->element_count()) != sharers * layout.num_segments) {
      Fail("numbers by segment have another size or type than the segments");
    }
    return {buffer->untyped_data(), is_shared ? 0 : layout.num_segments, is_double, 0};
  }

  // The next operand as the group of each segment, the same for all members.
  const int32_t* ReadGroups(int64_t num_segments) {
    const bool is_shared = IsShared(next_) || members() == 1;
    const std::optional<ffi::AnyBuffer> buffer = Argument(next_++);
    if (!buffer) return nullptr;
    if (!is_shared || buffer->element_type() != ffi::DataType::S32 ||
        static_cast<int64_t>(buffer->element_count()) != num_segments) {
      Fail("groups have another size or type than the segments");
    }
    return static_cast<const int32_t*>(buffer->untyped_data());
  }

  struct Taus {
    const void* data;
    int64_t stride;
    int64_t count;
  };

  // The next operand as numbers of the layout's type.
  Taus ReadTaus(const Layout& layout) {
    const bool is_shared = IsShared(next_);
    const std::optional<ffi::AnyBuffer> buffer = Argument(next_++);
    if (!buffer) return {};
    Require(buffer->element_type() == (layout.is_double ? ffi::DataType::F64 : ffi::DataType::F32),
            "taus have another type than the arena");
    const int64_t sharers = is_shared ? 1 : std::max<int64_t>(members(), 1);
    const int64_t count = static_cast<int64_t>(buffer->element_count()) / sharers;
    return {buffer->untyped_data(), is_shared ? 0 : count, count};
  }

  // Every segment lies in the arena and names a leaf and a group that are there. Without leaves or
  // groups, any will do.
  void CheckSegments(const Layout& layout, const std::vector<Leaf>* leaves,
                     int64_t num_groups = INT64_MAX) {
    const int64_t num_leaves = leaves == nullptr ? INT64_MAX : static_cast<int64_t>(leaves->size());
    for (int64_t i = 0; i < layout.num_segments; ++i) {
      const Segment& segment = layout.segments[i];
      if (segment.start < 0 || segment.size <= 0 || segment.start + segment.size > layout.size ||
          segment.leaf < 0 || segment.leaf >= num_leaves || segment.group < 0 ||
          segment.group >= num_groups) {
        return Fail("segment " + std::to_string(i) + " does not fit the operands");
      }
    }
  }

  void CheckInPlace(int64_t index, const void* data, const char* name) {
    const std::optional<ffi::AnyBuffer> buffer = Output(index);
    if (buffer && buffer->untyped_data() != data)
      Fail(std::string(name) + " is not updated in place");
  }

  // All operands from here on, or all results from the first wanted on, as leaves.
  std::vector<Leaf> RemainingLeaves(const Layout& layout) {
    std::vector<Leaf> leaves;
    leaves.reserve(args_.size() - static_cast<size_t>(next_));
    while (ok() && next_ < static_cast<int64_t>(args_.size())) {
      const bool is_shared = IsShared(next_);
      if (const std::optional<ffi::AnyBuffer> buffer = Argument(next_++))
        AddLeaf(*buffer, is_shared, layout, leaves);
    }
    return leaves;
  }

  std::vector<Leaf> ResultLeaves(const Layout& layout, int64_t first = 0) {
    std::vector<Leaf> leaves;
    leaves.reserve(rets_.size());
    for (int64_t i = first; ok() && i < static_cast<int64_t>(rets_.size()); ++i) {
      if (const std::optional<ffi::AnyBuffer> buffer = Output(i))
        AddLeaf(*buffer, false, layout, leaves);
    }
    return leaves;
  }

  GradientOperands Gradients(const Layout& layout) {
    if (Attribute<int64_t>("from_arena") == 0) {
      return {false, RemainingLeaves(layout), nullptr, 0};
    }
    const Arena arena = ReadArena(layout, "the gradient arena");
    return {true, {}, arena.data, arena.stride};
  }

 private:
  void Fail(const std::string& message) { Require(false, message); }

  std::optional<ffi::AnyBuffer> Argument(int64_t index) {
    auto buffer = args_.get<ffi::AnyBuffer>(static_cast<size_t>(index));
    if (buffer.has_value()) return *buffer;
    Fail("operand " + std::to_string(index) + " is missing");
    return std::nullopt;
  }

  std::optional<ffi::AnyBuffer> Output(int64_t index) {
    auto buffer = rets_.get<ffi::AnyBuffer>(static_cast<size_t>(index));
    if (buffer.has_value()) return **buffer;
    Fail("result " + std::to_string(index) + " is missing");
    return std::nullopt;
  }

  // `shared` is sorted.
  bool IsShared(int64_t operand) const {
    return std::binary_search(shared_.begin(), shared_.end(), operand);
  }

  void CheckArena(const ffi::AnyBuffer& buffer, int64_t members, const Layout& layout,
                  const char* name) {
    const auto type = layout.is_double ? ffi::DataType::F64 : ffi::DataType::F32;
    if (buffer.element_type() != type ||
        static_cast<int64_t>(buffer.element_count()) != members * layout.size) {
      Fail(std::string(name) + " has another size or type than the layout");
    }
  }

  void AddLeaf(const ffi::AnyBuffer& buffer, bool is_shared, const Layout& layout,
               std::vector<Leaf>& leaves) {
    Leaf leaf{buffer.untyped_data(), 0, LeafType::kF32};
    switch (buffer.element_type()) {
      case ffi::DataType::F32:
        leaf.type = LeafType::kF32;
        break;
      case ffi::DataType::BF16:
        leaf.type = LeafType::kBf16;
        break;
      case ffi::DataType::F16:
        leaf.type = LeafType::kF16;
        break;
      case ffi::DataType::F64:
        leaf.type = LeafType::kF64;
        Require(layout.is_double, "a float64 leaf beside a float32 arena");
        break;
      default:
        Fail("leaf " + std::to_string(leaves.size()) + " has a dtype that is not supported");
    }
    if (!is_shared && members() > 0)
      leaf.stride = static_cast<int64_t>(buffer.element_count()) / members();
    leaves.push_back(leaf);
  }

  const ffi::RemainingArgs& args_;
  const ffi::RemainingRets& rets_;
  const ffi::Dictionary& attributes_;
  std::optional<std::string> error_;
  const int64_t members_;
  const Words shared_;
  int64_t next_ = 0;
};

}  // namespace jaxrenaissance
