// The prologue's gate, for the kernels that prepare a product's input rows.
#pragma once
#include "linear/activation_slabs.cuh"

// The gate's factor, applied in float32 before the single rounding; silu is gate * sigmoid(gate).
DEVICE float sigmoid(float gate) { return __fdividef(1.0f, 1.0f + __expf(-gate)); }
