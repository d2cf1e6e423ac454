// From XLA's call frame to operands: the FFI vocabulary that both backends' handlers share.
#pragma once

#include <algorithm>
#include <optional>
#include <string>

#include "core/operands.h"
#include "core/reduction.h"
#include "core/scalars.h"
#include "ffi/program.h"
#include "xla/ffi/api/ffi.h"

namespace jaxrenaissance {

inline std::optional<LeafType> LeafTypeOf(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32:
      return LeafType::kF32;
    case ffi::DataType::BF16:
      return LeafType::kBf16;
    case ffi::DataType::F16:
      return LeafType::kF16;
    case ffi::DataType::F64:
      return LeafType::kF64;
    default:
      return std::nullopt;
  }
}

// Reads the operands and results of one call in order, and remembers the first thing that is wrong.
class Decoder {
 public:
  Decoder(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets, const Program& program)
      : args_(args), rets_(rets), program_(program) {}

  bool ok() const { return !error_.has_value(); }
  ffi::Error error() const {
    return ok() ? ffi::Error::Success() : ffi::Error::InvalidArgument(*error_);
  }

  const Program& program() const { return program_; }
  int64_t members() const { return program_.attributes.members; }

  void Require(bool condition, const char* message) {
    if (!condition) Fail(message);
  }

  int64_t Attribute(int64_t Attributes::* field) {
    const int64_t value = program_.attributes.*field;
    if (value != kMissing) return value;
    for (const AttributeField& own : kAttributeFields) {
      if (own.field == field) Fail(std::string("attribute ") + own.name + " is missing");
    }
    return 0;
  }

  Layout ReadLayoutOfAnyType() {
    Require(program_.has_layout, "attribute layout is missing");
    return program_.layout;
  }

  Layout ReadLayout() {
    const Layout layout = ReadLayoutOfAnyType();
    Require(layout.type == LeafType::kF32 || layout.is_double,
            "only pack and unpack work with an arena of bfloat16 or float16");
    return layout;
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
    if (arena.stride != layout.size) Fail(std::string(name) + " are shared by members");
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
    if (!ok()) return {};
    Workspace workspace{nullptr, 0, layout.num_segments, program_.first_partials.back()};
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

  PieceIndex ReadPieceIndex() {
    const int64_t shards = Attribute(&Attributes::shards);
    Require(shards > 0, "shards is not positive");
    const bool is_shared = IsShared(next_);
    const std::optional<ffi::AnyBuffer> buffer = Argument(next_++);
    if (!buffer) return {};
    if (buffer->element_type() != ffi::DataType::S32 ||
        static_cast<int64_t>(buffer->element_count()) != (is_shared ? 1 : members())) {
      Fail("the index is not an int32");
    }
    return {static_cast<const int32_t*>(buffer->untyped_data()), is_shared ? 0 : 1, shards};
  }

  // Every segment names a leaf and a group that are there. Without leaves or groups, any will do.
  void CheckSegments(const Leaves* leaves, int64_t num_groups = INT64_MAX) {
    Require(leaves == nullptr || program_.num_leaves <= leaves->size(),
            "segments name more leaves than there are");
    Require(program_.num_groups <= num_groups, "segments name more groups than there are");
  }

  void CheckInPlace(int64_t index, const void* data, const char* name) {
    const std::optional<ffi::AnyBuffer> buffer = Output(index);
    if (buffer && buffer->untyped_data() != data)
      Fail(std::string(name) + " is not updated in place");
  }

  // All operands from here on, or all results from the first wanted on, as leaves.
  Leaves RemainingLeaves(const Layout& layout) {
    const int64_t first = next_;
    next_ = static_cast<int64_t>(args_.size());
    return ReadLeaves(layout, program_.operand_leaves, first, next_,
                      [&](int64_t i) { return Argument(i); });
  }

  Leaves ResultLeaves(const Layout& layout, int64_t first = 0) {
    const auto count = static_cast<int64_t>(rets_.size());
    return ReadLeaves(layout, program_.result_leaves, first, count,
                      [&](int64_t i) { return Output(i); });
  }

  GradientOperands Gradients(const Layout& layout) {
    if (Attribute(&Attributes::from_arena) == 0) {
      return {false, RemainingLeaves(layout), nullptr, 0};
    }
    const Arena arena = ReadArena(layout, "the gradient arena");
    return {true, {}, arena.data, arena.stride};
  }

 private:
  void Fail(const std::string& message) {
    if (ok()) error_ = "jaxrenaissance: " + message;
  }

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

  bool IsShared(int64_t operand) const {
    return std::binary_search(program_.shared.begin(), program_.shared.end(), operand);
  }

  void CheckArena(const ffi::AnyBuffer& buffer, int64_t members, const Layout& layout,
                  const char* name) {
    if (LeafTypeOf(buffer.element_type()) != layout.type ||
        static_cast<int64_t>(buffer.element_count()) != members * layout.size) {
      Fail(std::string(name) + " has another size or type than the layout");
    }
  }

  // Buffers [first, last) of get() as leaves. Their types and sizes are looked at once.
  template <typename F>
  Leaves ReadLeaves(const Layout& layout, const LeafForms& known, int64_t first, int64_t last,
                    const F& get) {
    Leaves leaves{};
    if (!ok()) return leaves;
    leaves.data.resize(static_cast<size_t>(last - first));
    for (int64_t i = first; i < last; ++i) {
      const std::optional<ffi::AnyBuffer> buffer = get(i);
      if (!buffer) return leaves;
      leaves.data[static_cast<size_t>(i - first)] = buffer->untyped_data();
    }
    const bool are_operands = &known == &program_.operand_leaves;
    const auto make = [&](std::optional<std::string>& error) {
      std::vector<LeafForm> forms;
      for (int64_t i = first; i < last && !error; ++i)
        forms.push_back(FormOf(*get(i), are_operands && IsShared(i), layout, i - first, error));
      return forms;
    };
    leaves.forms = known.Once(make).data();
    if (known.error()) Fail(*known.error());
    return leaves;
  }

  LeafForm FormOf(const ffi::AnyBuffer& buffer, bool is_shared, const Layout& layout,
                  int64_t number, std::optional<std::string>& error) const {
    const std::optional<LeafType> type = LeafTypeOf(buffer.element_type());
    if (!type) error = "leaf " + std::to_string(number) + " has a dtype that is not supported";
    if (type == LeafType::kF64 && !layout.is_double)
      error = "a float64 leaf beside an arena that is not float64";
    LeafForm form{0, type.value_or(LeafType::kF32)};
    if (!is_shared && members() > 0)
      form.stride = static_cast<int64_t>(buffer.element_count()) / members();
    return form;
  }

  const ffi::RemainingArgs& args_;
  const ffi::RemainingRets& rets_;
  const Program& program_;
  std::optional<std::string> error_;
  int64_t next_ = 0;
};

}  // namespace jaxrenaissance
