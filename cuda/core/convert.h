// Leaf dtypes and their conversions: bits in, bits out, round to nearest even, the same on host and
// device.
#pragma once

#include <cstring>
#include <type_traits>

#include "core/config.h"

namespace jaxrenaissance {

enum class LeafType : int { kF32 = 0, kBf16 = 1, kF16 = 2, kF64 = 3 };

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

JR_HD constexpr int LeafTypeSize(LeafType type) {
  return type == LeafType::kF64 ? 8 : type == LeafType::kF32 ? 4 : 2;
}

template <typename To, typename From>
JR_HD To BitCast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

JR_HD float Widen(Bf16 x) { return BitCast<float>(static_cast<uint32_t>(x.bits) << 16); }

JR_HD float Widen(F16 x) {
  const uint32_t magnitude = x.bits & 0x7fffu;
  // The exponent is rebased by an exact multiplication, which also normalises subnormals.
  float value = BitCast<float>(magnitude << 13) * 0x1p112f;
  if (magnitude >= 0x7c00u) value = BitCast<float>((magnitude << 13) | 0x7f800000u);
  return BitCast<float>(BitCast<uint32_t>(value) | (static_cast<uint32_t>(x.bits & 0x8000u) << 16));
}

JR_HD float Widen(float x) { return x; }
JR_HD double Widen(double x) { return x; }

template <typename To>
JR_HD To Narrow(float x);

template <>
JR_HD float Narrow<float>(float x) {
  return x;
}

template <>
JR_HD double Narrow<double>(float x) {
  return x;
}

template <>
JR_HD Bf16 Narrow<Bf16>(float x) {
  const uint32_t u = BitCast<uint32_t>(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const uint32_t quiet = (u >> 16) | 0x40u;
  return {static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? quiet : rounded)};
}

template <>
JR_HD F16 Narrow<F16>(float x) {
  const uint32_t u = BitCast<uint32_t>(x);
  const uint32_t magnitude = u & 0x7fffffffu;
  // Normal results: move the exponent, round to even on the 13 bits that go. The carry may reach
  // infinity, rightly.
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Subnormal results: adding 0.5 lets the addition itself round at 2^-24.
  const uint32_t subnormal = BitCast<uint32_t>(BitCast<float>(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t h = magnitude >= 0x47800000u  ? special
                     : magnitude < 0x38800000u ? subnormal
                                               : normal;
  return {static_cast<uint16_t>(h | ((u >> 16) & 0x8000u))};
}

// A double goes to a narrow type directly, not through float: two roundings are not one.
JR_HD float RoundToOddFloat(double x) {
  float f = static_cast<float>(x);
  if (static_cast<double>(f) != x && x == x) {
    // Round to odd keeps a sticky bit, so that the second rounding sees on which side of a tie the
    // double was.
    uint32_t u = BitCast<uint32_t>(f);
    const double magnitude = x < 0 ? -x : x;
    const double rounded = static_cast<double>(f < 0 ? -f : f);
    if ((u & 0x7fffffffu) == 0x7f800000u) return f;
    if (rounded > magnitude) u -= 1;
    f = BitCast<float>(u | 1u);
  }
  return f;
}

template <typename To>
JR_HD To Narrow(double x) {
  if constexpr (sizeof(To) == 8) {
    return x;
  } else if constexpr (sizeof(To) == 4) {
    return static_cast<float>(x);
  } else {
    return Narrow<To>(RoundToOddFloat(x));
  }
}

// Between any two types, with one rounding. The same type keeps its bits, those of a NaN too.
template <typename To, typename From>
JR_HD To Convert(From x) {
  if constexpr (std::is_same_v<To, From>) {
    return x;
  } else {
    return Narrow<To>(Widen(x));
  }
}

JR_HD bool IsNonFinite(float x) { return (BitCast<uint32_t>(x) & 0x7f800000u) == 0x7f800000u; }
JR_HD bool IsNonFinite(Bf16 x) { return (x.bits & 0x7f80u) == 0x7f80u; }
JR_HD bool IsNonFinite(F16 x) { return (x.bits & 0x7c00u) == 0x7c00u; }
JR_HD bool IsNonFinite(double x) {
  return (BitCast<uint64_t>(x) & 0x7ff0000000000000ull) == 0x7ff0000000000000ull;
}

}  // namespace jaxrenaissance
