// From XLA's call frame to operands: the FFI vocabulary that both backends' handlers share.
#pragma once

#include <optional>
#include <string>

#include "core/operands.h"
#include "core/scalars.h"
#include "xla/ffi/api/ffi.h"

namespace jaxrenaissance {

namespace ffi = xla::ffi;

// Reads the operands and results of one call in order, and remembers the first thing that is wrong.
class Decoder {
 public:
  // `shared` lists the operands (counted after the tables) that all members of a batch share, after
  // a leading -1.
  Decoder(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets, int64_t tables,
          int64_t members, ffi::Span<const int64_t> shared)
      : args_(args),
        rets_(rets),
        tables_(tables),
        members_(members),
        shared_(shared),
        next_(tables) {}

  bool ok() const { return !error_.has_value(); }
  ffi::Error error() const {
    return ok() ? ffi::Error::Success() : ffi::Error::InvalidArgument(*error_);
  }

  void Fail(const std::string& message) {
    if (ok()) error_ = "jaxrenaissance: " + message;
  }

  void* Table(int64_t index) {
    const std::optional<ffi::AnyBuffer> buffer = Argument(index);
    return buffer ? buffer->untyped_data() : nullptr;
  }

  // The segment table is the last one: int32 words, ten a row.
  void Segments(Layout& layout) {
    const std::optional<ffi::AnyBuffer> buffer = Argument(tables_ - 1);
    if (!buffer) return;
    layout.segments = static_cast<const Segment*>(buffer->untyped_data());
    layout.num_segments = static_cast<int64_t>(buffer->size_bytes() / sizeof(Segment));
    layout.members = members_;
  }

  // The next operand as an arena. Its element count fixes layout.size if that is not known yet (<
  // 0).
  void* Arena(Layout& layout, bool& is_double, const char* name) {
    const bool is_shared = IsShared(next_ - tables_);
    const std::optional<ffi::AnyBuffer> buffer = Argument(next_++);
    if (!buffer) return nullptr;
    CheckArena(*buffer, is_shared, layout, is_double, name);
    return buffer->untyped_data();
  }

  void* ResultArena(int64_t index, Layout& layout, bool& is_double, const char* name) {
    const std::optional<ffi::AnyBuffer> buffer = Output(index);
    if (!buffer) return nullptr;
    CheckArena(*buffer, false, layout, is_double, name);
    return buffer->untyped_data();
  }

  // Result `index` updates the buffer `data` in place: XLA has made them one, or has copied before.
  void CheckInPlace(int64_t index, const void* data, const char* name) {
    const std::optional<ffi::AnyBuffer> buffer = Output(index);
    if (buffer && buffer->untyped_data() != data)
      Fail(std::string(name) + " is not updated in place");
  }

  Floats ReadFloats() {
    const bool is_shared = IsShared(next_ - tables_);
    const std::optional<ffi::AnyBuffer> buffer = Argument(next_++);
    if (!buffer) return {};
    const int64_t count = static_cast<int64_t>(buffer->element_count());
    const bool is_double = buffer->element_type() == ffi::DataType::F64;
    if (!is_double && buffer->element_type() != ffi::DataType::F32)
      Fail("floats are not float32 or float64");
    return {buffer->untyped_data(), is_shared || members_ == 0 ? 0 : count / members_, is_double};
  }

  int32_t* Ints() {
    const std::optional<ffi::AnyBuffer> buffer = Argument(next_++);
    if (!buffer) return nullptr;
    if (buffer->element_type() != ffi::DataType::S32 ||
        static_cast<int64_t>(buffer->element_count()) != members_ * kInts) {
      Fail("ints are not int32 counters");
    }
    return static_cast<int32_t*>(buffer->untyped_data());
  }

  // All operands from here on, or all results, as leaves.
  std::vector<Leaf> RemainingLeaves() {
    std::vector<Leaf> leaves;
    leaves.reserve(args_.size() - static_cast<size_t>(next_));
    while (ok() && next_ < static_cast<int64_t>(args_.size())) {
      const bool is_shared = IsShared(next_ - tables_);
      if (const std::optional<ffi::AnyBuffer> buffer = Argument(next_++))
        AddLeaf(*buffer, is_shared, leaves);
    }
    return leaves;
  }

  std::vector<Leaf> ResultLeaves() {
    std::vector<Leaf> leaves;
    leaves.reserve(rets_.size());
    for (int64_t i = 0; ok() && i < static_cast<int64_t>(rets_.size()); ++i) {
      if (const std::optional<ffi::AnyBuffer> buffer = Output(i)) AddLeaf(*buffer, false, leaves);
    }
    return leaves;
  }

  GradientOperands Gradients(bool from_arena, Layout& layout, bool& is_double) {
    if (!from_arena) return {false, RemainingLeaves(), nullptr, 0};
    const bool is_shared = IsShared(next_ - tables_);
    const void* arena = Arena(layout, is_double, "the gradient arena");
    return {true, {}, arena, is_shared ? 0 : layout.size};
  }

 private:
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
    for (const int64_t index : shared_) {
      if (index == operand) return true;
    }
    return false;
  }

  void CheckArena(const ffi::AnyBuffer& buffer, bool is_shared, Layout& layout, bool& is_double,
                  const char* name) {
    const bool wide = buffer.element_type() == ffi::DataType::F64;
    const int64_t members = is_shared ? 1 : members_;
    const int64_t count = static_cast<int64_t>(buffer.element_count());
    if (!wide && buffer.element_type() != ffi::DataType::F32) {
      Fail(std::string(name) + " is not float32 or float64");
    } else if (layout.size < 0) {
      layout.size = members == 0 ? 0 : count / members;
      is_double = wide;
    } else if (count != members * layout.size || wide != is_double) {
      Fail(std::string(name) + " has another size or type than the layout");
    }
  }

  void AddLeaf(const ffi::AnyBuffer& buffer, bool is_shared, std::vector<Leaf>& leaves) {
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
        break;
      default:
        Fail("leaf " + std::to_string(leaves.size()) + " has a dtype that is not supported");
    }
    if (!is_shared && members_ > 0)
      leaf.stride = static_cast<int64_t>(buffer.element_count()) / members_;
    leaves.push_back(leaf);
  }

  const ffi::RemainingArgs& args_;
  const ffi::RemainingRets& rets_;
  const int64_t tables_, members_;
  const ffi::Span<const int64_t> shared_;
  int64_t next_;
  std::optional<std::string> error_;
};

}  // namespace jaxrenaissance
