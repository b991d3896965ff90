// From an item's sums to output rows: adds the partial sums that the warps and blocks of a cluster
// made over different ranges of K, in a fixed order (cluster_reduce.cuh), then runs the epilogue.
//
// Compile-time: EPILOGUE 0 none, 1 swiglu, 2 residual, 3 float32 logits; ROW_SCALE, whether the
// sums of a row are multiplied by its 1 / rms; NEXT, what is written to slabs for the next product:
// 0 nothing; 1 or 2 the rows times (offset + weight) of the next norm, whose weight is bf16 or
// float32; 3 the rows.
#pragma once
#include "linear/cluster_reduce.cuh"

constexpr int MOST_ROWS = 32;
constexpr int SQUARES_COLUMNS = 32;
static_assert(!NARROW || EPILOGUE == SWIGLU, "no squares of a narrow tile");

// For a lane's rows 8 i + own_row() of a row tile: the sums of squares of the values that it stored.
typedef float Squares[2];

DEVICE float scale_of(const Results& to, int row) {
    return bits_float(load_shared4(to.row_scales + 4 * row));
}

DEVICE float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// Computes 1 / rms of each row from sums of squares [chunks, 32]. Called by one warp; each lane
// adds four rows over some of the chunks.
DEVICE void row_scales(float* scales, const float* squares, float eps) {
    constexpr int ROW_LANES = ROWS / 4, STEP = 32 / ROW_LANES, AT_ONCE = 10;
    constexpr int chunks = (K_SIZE + SQUARES_COLUMNS - 1) / SQUARES_COLUMNS;
    const int lane = threadIdx.x % 32;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (int first = lane / ROW_LANES; first < chunks; first += AT_ONCE * STEP) {
        float4 v[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int c = first + i * STEP;
            v[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (c < chunks) {
                v[i] = load_shared_result(reinterpret_cast<const float4*>(
                    squares + c * MOST_ROWS + lane % ROW_LANES * 4));
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            sum = make_float4(sum.x + v[i].x, sum.y + v[i].y, sum.z + v[i].z, sum.w + v[i].w);
        }
    }
#pragma unroll
    for (int mask = ROW_LANES; mask < 32; mask *= 2) {
        sum.x += shuffle_xor(sum.x, mask);
        sum.y += shuffle_xor(sum.y, mask);
        sum.z += shuffle_xor(sum.z, mask);
        sum.w += shuffle_xor(sum.w, mask);
    }
    if (lane >= ROW_LANES) return;
    constexpr float part = 1.0f / K_SIZE;
    *reinterpret_cast<float4*>(scales + 4 * lane) =
        make_float4(rsqrtf(sum.x * part + eps), rsqrtf(sum.y * part + eps),
                    rsqrtf(sum.z * part + eps), rsqrtf(sum.w * part + eps));
}

// The epilogue of one strip (swiglu: a pair of strips) for one of a lane's rows. Returns the sum of
// squares of the two stored values.
DEVICE float store_strip(const Results& to, const Place& place, int row, float2 sum, float2 up,
                         u32 residual, Raw raw) {
    if (!place.valid() || row >= to.rows) return 0.0f;
    const int at = place.at(row);
#if EPILOGUE == 3
    *reinterpret_cast<float2*>(reinterpret_cast<float*>(place.output) + at) = sum;
    return 0.0f;
#else
#if EPILOGUE == 1
    sum = make_float2(silu(sum.x) * up.x, silu(sum.y) * up.y);
#elif EPILOGUE == 2
    sum = make_float2(bf16x2_low(residual) + sum.x, bf16x2_high(residual) + sum.y);
#endif
    const u32 pair = pack_bf16x2(sum.x, sum.y);
    *reinterpret_cast<u32*>(reinterpret_cast<u16*>(place.output) + at) = pair;
    const float low = bf16x2_low(pair), high = bf16x2_high(pair);
#if NEXT
    const int column = place.column();
    u16* const slab = to.y_slabs + slab_offset(to.rows, row, column) + column % 8;
#endif
#if NEXT == 3
    *reinterpret_cast<u32*>(slab) = pair;
#elif NEXT
    const float2 factor = factor_of(to, raw);
    *reinterpret_cast<u32*>(slab) = pack_bf16x2(low * factor.x, high * factor.y);
#endif
    return fma_rn(high, high, low * low);
#endif
}

DEVICE void store_own(Squares& squares, const OwnSums& own, const EpilogueOperands& end, const Results& to, int m) {
    constexpr int STRIDE = EPILOGUE == SWIGLU ? 2 : 1;  // input strips per output strip
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = 16 * m + 8 * i + own_row();
        const float factor = ROW_SCALE ? scale_of(to, row) : 1.0f;
        squares[i] = 0.0f;
#pragma unroll
        for (int j = 0; j < OWN_STRIPS; j += STRIDE) {
            float2 v[2];
#pragma unroll
            for (int s = 0; s < STRIDE; s++) {
                const float(&sum)[4] = own[j + s];
                const float2 scale = end.scales[j + s];
                v[s] = make_float2(sum[2 * i] * scale.x * factor, sum[2 * i + 1] * scale.y * factor);
            }
            const u32 add = EPILOGUE == RESIDUAL ? end.residual[i][j] : 0;
            squares[i] +=
                store_strip(to, end.places[j], row, v[0], v[STRIDE - 1], add, end.factors[j]);
        }
    }
}

// Stores each row's sum of squares over 32 columns, added over a warp's lanes in a fixed order.
DEVICE void store_squares(Squares& squares, const Results& to, int column, int m, bool padding) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        squares[i] += shuffle_xor(squares[i], 1);
        squares[i] += shuffle_xor(squares[i], 2);
#pragma unroll
        for (int far = STRIP_LANES; far < 32; far *= 2) squares[i] += shuffle_xor(squares[i], far);
    }
    if (padding || lane >= STRIP_LANES || lane % 4 != 0) return;
    float* const at = to.y_squares + column / SQUARES_COLUMNS * MOST_ROWS + 16 * m + own_row();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        at[8 * i] = squares[i];
        if (ROW_TILES == 1) at[16 + 8 * i] = 0.0f;
    }
}

// Finishes eight rows of a narrow tile: one strip of gate and one of up. Returns what `release` needs.
DEVICE u32 run_narrow_epilogue(const PartialSumBuffer& partials, saddr scales_made, const Results& to, const WorkTile& item,
                          saddr staged, int octet, int number) {
    const int lane = threadIdx.x % 32, row = 8 * octet + lane / 4;
    wait_staged();
    const float2 gate = pair_at(staged + 8 * (lane % 4)), up = pair_at(staged + 8 * (4 + lane % 4));
    Place place;
    place.strip = strip_at(staged + STAGED_STRIPS);
    place.output = to.outputs[0];
    if (ROW_SCALE) barrier_wait(scales_made, 0);
    barrier_wait_cluster(partials.arrived, PartialSumBuffer::parity(number));
    const float4 sum = partials.add_narrow(octet % OWN_OCTETS);
    const float factor = ROW_SCALE ? scale_of(to, row) : 1.0f;
    store_strip(to, place, row, make_float2(sum.x * gate.x * factor, sum.y * gate.y * factor),
                make_float2(sum.z * up.x * factor, sum.w * up.y * factor), 0, Raw{});
    return float_bits(sum.x) ^ float_bits(gate.x) ^ float_bits(up.x) ^ place.strip.x;
}

// What a warp finishes of an item: half an n-tile of a row tile, eight rows of a narrow tile, both
// or neither.
struct WarpShare {
    int half, octet;  // below 0: none

    DEVICE WarpShare(const WorkTile& item, int rank) {
        const int warp = threadIdx.x / 32, halves = PartialSumBuffer::share(item), own = own_half();
        half = own < halves && rank * halves + own < item.halves() ? rank * halves + own : -1;
        // If there are warps that finish no half, they take the octets.
        const int first = ROW_TILES > 1 ? 0 : halves;
        const bool narrow = item.narrow.there() && warp >= first && warp < first + OWN_OCTETS;
        octet = narrow ? rank * OWN_OCTETS + warp - first : -1;
    }
    DEVICE int column(const WorkTile& item) const { return item.column + half * SQUARES_COLUMNS; }
    // Offset of a narrow tile's staged data: the warp's own area if it finishes no half, else an
    // area behind those of all warps.
    DEVICE static int narrow_at() { return ROW_TILES > 1 ? WARPS * STAGED_BYTES : 0; }
    DEVICE void stage(saddr to, const Results& from, const WorkTile& item) const {
        if (half >= 0) stage_end(to, from, column(item), HALF_TILE);
        if (octet >= 0) stage_end(to + narrow_at(), from, item.narrow.column, HALF_TILE / 2);
    }
};

// Finishes an item after its last product. `staged`: the data that this warp's share needs.
DEVICE void run_epilogue(Sums& sums, const NarrowSums& narrow_sums, const PartialSumBuffer& partials, saddr scales_made,
                   const Results& to, const WorkTile& item, saddr staged, int number, int rank) {
    const WarpShare share(item, rank);
    // Warps with nothing to send wait too: otherwise they could get two phases ahead and miss one.
    // For the first item the wait would succeed at once, but still take time.
    if (MANY && number > 0) barrier_wait_cluster(partials.free, PartialSumBuffer::parity_before(number));
    const WarpTile part(item, threadIdx.x / 32);
    u32 last = part.of(item) ? partials.deliver(sums, item, part, rank) : 0;
    if (item.narrow.there()) partials.send_narrow(narrow_sums, rank);
    if (share.octet >= 0) {
        last ^= run_narrow_epilogue(partials, scales_made, to, item, staged + WarpShare::narrow_at(), share.octet,
                              number);
    }
    if (share.half < 0) {
        if (item.left) partials.release(last);
        return;
    }
    const int column = share.column(item), m = own_row_tile();
    EpilogueOperands end;
    wait_staged();
    load_end(end, to, staged, m);
    if (ROW_SCALE) barrier_wait(scales_made, 0);
    barrier_wait_cluster(partials.arrived, PartialSumBuffer::parity(number));
    OwnSums own;
    partials.add(own);
    if (item.left) partials.release(last ^ end.last() ^ last_of(own));
    Squares squares;
    store_own(squares, own, end, to, m);
    const bool padding = end.places[0].strip.x < 0;
    if (to.y_squares) store_squares(squares, to, column, m, padding);
}
