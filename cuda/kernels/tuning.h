// Launch constants, apart from the kernels. kTile is part of the tables that Python builds: it
// reads it from the module.
#pragma once

namespace jaxrenaissance {

constexpr int kVector = 4;     // elements a thread moves at once: 16 bytes of float32
constexpr int kThreads = 256;  // threads a block
#ifndef JR_UNROLL
#define JR_UNROLL 1
#endif
constexpr int kUnroll = JR_UNROLL;                   // vectors a thread has in flight
constexpr int kTile = kVector * kThreads * kUnroll;  // elements a block

// Leaves a launch: kernel parameters are copied on every launch, so small models take a small
// table. The largest leaves room for the other parameters below the limit of 32,764 bytes.
constexpr int kSmallTable = 64;
constexpr int kMediumTable = 448;
constexpr int kLargeTable = 2016;

}  // namespace jaxrenaissance
