// How a context is cut into pieces, who has which, and how their results become one row.
//
// A context is cut by its length alone: its steps go round pieces, GROUP pieces that follow each other are a group. The
// warps of a piece are taken in at once, then pieces within a group one after the other, then groups. A row has the same bits
// however it is shared out:
//   one piece   the block that has it writes the result
//   few rows    a block a piece, which sends its result to blocks that have none; those wait for it, each for some columns
//   many rows   a block takes all pieces of a group, and group after group; the last one to be done combines the groups
// Blocks that wait are the last ones of a grid, so that whoever they wait for is there before them.
#pragma once
#include "bf16.cuh"
#include "cache.cuh"
#include "fast_math.cuh"
#include "global_memory.cuh"
#include "opaque.cuh"

constexpr int GROUP = 8, MAX_GROUPS = 8;
// A piece has at least so many tokens (launch.py has the number too).
constexpr int PIECE_TOKENS = 64;

// For 0.1 us or a little longer.
__device__ __forceinline__ void pause() { asm volatile("nanosleep.u32 100;"); }

// --- device functions ---

// The score of what is not there, and the largest of none: finite, so that what is not there counts 2^-infinity.
__device__ __forceinline__ float no_score() { return __int_as_float(0xff800000); }
constexpr float NO_TOP = -3.0e38f;

// How a row is cut, by its length alone: ``most`` is the same for all rows of a launch, and of every launch with these heads.
struct Cut {
    int pieces, groups;

    __device__ __forceinline__ Cut(int length, int most)
        : pieces(min(most, (length + PIECE_TOKENS - 1) / PIECE_TOKENS)), groups((pieces + GROUP - 1) / GROUP) {}
};

// A block among those that work on one row and key head: with SPREAD its piece, otherwise its first group, and how many
// take pieces or groups. ``scratch`` and ``zeros`` are what they combine their results in; the second holds zeros between
// launches.
struct Team {
    int index, sharing, most;
    float* scratch;
    u32* zeros;
};

// Largest score and sum of weights; a sum of -1 for what has a page outside the cache.
using Stats = float2;

// Partial results, taken in one after the other, of one head.
struct Running {
    float top = NO_TOP, weight = 0.0f;
    bool is_bad = false;

    // Returns what the values so far, and the new ones, count.
    __device__ __forceinline__ float2 take(Stats part) {
        const bool is_larger = part.x > top;
        const float smaller_share = exp2_approx(-fabsf(__fsub_rn(top, part.x)));
        const float old_share = is_larger ? smaller_share : 1.0f, new_share = is_larger ? 1.0f : smaller_share;
        weight = __fmaf_rn(new_share, part.y, __fmul_rn(weight, old_share));
        top = is_larger ? part.x : top;
        is_bad |= part.y < 0.0f;
        return make_float2(old_share, new_share);
    }
    __device__ __forceinline__ Stats stats() const { return make_float2(top, is_bad ? -1.0f : weight); }
};

__device__ __forceinline__ float mix(float total, float value, float2 shares) {
    return __fmaf_rn(shares.y, value, __fmul_rn(total, shares.x));
}

// A result as it is stored, ``inverse`` of the weights and ``factor`` from the gate. -0 becomes 0: it depends on how a row is
// shared out.
__device__ __forceinline__ bf16 finished(float total, bool is_zero, float inverse, bool is_gated, float factor) {
    const float mean = __fmul_rn(__fadd_rn(total, 0.0f), inverse);
    const bf16 rounded = __float2bfloat16_rn(is_zero ? 0.0f : mean);
    return is_gated ? __float2bfloat16_rn(__fmul_rn(__bfloat162float(rounded), factor)) : rounded;
}

// Writes a result of heads 2t and 2t + 1 in column c + g of a lane (g, t) = (lane / 4, lane % 4): two columns of one head go
// to ``out``. By whole warps.
__device__ __forceinline__ void write_columns(bf16* out, bool exists, float2 of_heads, float weight, float inverse,
                                              bool is_gated, u32 gate) {
    const bool is_odd = threadIdx.x & 4;
    const float own = is_odd ? of_heads.y : of_heads.x;
    const float got = __shfl_xor_sync(0xffffffffu, is_odd ? of_heads.x : of_heads.y, 4);
    // -0 becomes 0: it depends on how a row is shared out.
    const float low = __fmul_rn(__fadd_rn(is_odd ? got : own, 0.0f), inverse);
    const float high = __fmul_rn(__fadd_rn(is_odd ? own : got, 0.0f), inverse);
    u32 words = weight <= 0.0f ? 0u : bf16_pair(low, high);
    if (is_gated)
        words = bf16_pair(__fmul_rn(__uint_as_float(words << 16), sigmoid(__uint_as_float(gate << 16))),
                          __fmul_rn(__uint_as_float(words & 0xffff0000u), sigmoid(__uint_as_float(gate & 0xffff0000u))));
    if (exists) *reinterpret_cast<u32*>(out) = words;
}

// Values as the tensor core leaves them: o[j] = {(2t, d), (2t + 1, d), (2t, d + 8), (2t + 1, d + 8)} as (head, d), d = 16 j + g
// from some column on.
template <int J>
using Columns = float[J][4];

// The tiles of a piece, of one head, taken in at once: what each counts.
struct Tiles {
    float shares[WARPS];

    __device__ __forceinline__ Running take(const Stats (&tiles)[WARPS]) {
        Running all;
        all.top = fmaxf(fmaxf(tiles[0].x, tiles[1].x), fmaxf(tiles[2].x, tiles[3].x));
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            shares[w] = exp2_approx(__fsub_rn(tiles[w].x, all.top));
            all.weight = w == 0 ? __fmul_rn(shares[0], tiles[0].y) : __fmaf_rn(shares[w], tiles[w].y, all.weight);
            all.is_bad |= tiles[w].y < 0.0f;
        }
        return all;
    }
    __device__ __forceinline__ float add(float total, float value, int w) const {
        return w == 0 ? __fmul_rn(shares[0], value) : __fmaf_rn(shares[w], value, total);
    }
};

template <int J>
__device__ __forceinline__ void mix_columns(Columns<J>& total, const Columns<J>& part, const float2 (&shares)[2]) {
#pragma unroll
    for (int j = 0; j < J; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) total[j][i] = mix(total[j][i], part[j][i], shares[i & 1]);
}

// Partial results of a block, taken in one after the other. Warp w has 16 * J columns from 16 * J * w on.
template <int J>
struct Held {
    Columns<J> total = {};
    Running of_head[2];  // 2t and 2t + 1

    __device__ __forceinline__ static int first_column() { return threadIdx.x / 32 * (16 * J); }
    __device__ __forceinline__ void take(const Columns<J>& part, const Stats (&stats)[2]) {
        const float2 shares[2] = {of_head[0].take(stats[0]), of_head[1].take(stats[1])};
        mix_columns<J>(total, part, shares);
    }

    __device__ __forceinline__ void write(const Row& row, int D) const {
        const int g = threadIdx.x >> 2 & 7, head = 2 * (threadIdx.x & 3) + (g & 1), at = head * D + first_column() + (g & ~1);
        const bool exists = head < row.heads, is_gated = row.gate != nullptr;
        const float even = of_head[0].stats().y, odd = of_head[1].stats().y, weight = g & 1 ? odd : even;
        const float inverse = __frcp_rn(weight);
        u32 gates[2 * J] = {};
        if (is_gated && exists)
#pragma unroll
            for (int i = 0; i < 2 * J; ++i) gates[i] = *reinterpret_cast<const u32*>(row.gate + at + 8 * i);
#pragma unroll
        for (int i = 0; i < 2 * J; ++i)
            write_columns(row.out + at + 8 * i, exists, make_float2(total[i / 2][i % 2 * 2], total[i / 2][i % 2 * 2 + 1]), weight,
                          inverse, is_gated, gates[i]);
    }
};

// --- many rows: groups in scratch memory ---

// A group as the threads of a block have it, and statistics of all heads.
template <int D>
struct Slice {
    static constexpr int FLOATS = HEADS * (D + 2);
    float4* const at;

    __device__ __forceinline__ Slice(const Team& team, int group)
        : at(reinterpret_cast<float4*>(team.scratch + (size_t)group * FLOATS)) {}
    __device__ __forceinline__ float4* stats() const { return at + HEADS * D / 4 + (threadIdx.x & 3); }

    __device__ __forceinline__ void write(const Held<D / 64>& held) const {
        const Stats first = held.of_head[0].stats(), second = held.of_head[1].stats();
#pragma unroll
        for (int j = 0; j < D / 64; ++j)
            at[j * THREADS + threadIdx.x] = make_float4(held.total[j][0], held.total[j][1], held.total[j][2], held.total[j][3]);
        if (threadIdx.x < 4) *stats() = make_float4(first.x, first.y, second.x, second.y);
    }
    __device__ __forceinline__ void take(Held<D / 64>& held) const {
        const float4 both = __ldcg(stats());
        const Stats of_head[2] = {make_float2(both.x, both.y), make_float2(both.z, both.w)};
        Columns<D / 64> part;
#pragma unroll
        for (int j = 0; j < D / 64; ++j) {
            const float4 v = __ldcg(at + j * THREADS + threadIdx.x);
            part[j][0] = v.x, part[j][1] = v.y, part[j][2] = v.z, part[j][3] = v.w;
        }
        held.take(part, of_head);
    }
};

// Whether this block, which has written ``added`` of ``all`` slices, is the last one to have done so.
__device__ __forceinline__ bool is_last(u32* count, int added, int all) {
    bool is_all = false;
    __syncthreads();
    if (threadIdx.x == 0) {
        is_all = add_acq_rel(count, added) + added == all;
        if (is_all) *count = 0;
    }
    return __syncthreads_or(is_all);
}

// --- few rows: mail ---

// A block with SPREAD: for each 16 tokens of a step two warps, which have half of the keys each, or one where there are fewer
// than 128 columns. Of the result each has D / warps columns.
template <int D>
struct Spread {
    static constexpr int HALVES = D >= 128 ? 2 : 1, WARPS = ::WARPS * HALVES, THREADS = 32 * WARPS, J = D / WARPS / 16;
};

// What eight columns of a piece are sent in, four and the fourth from each on: values [4, HEADS, 2], then statistics. Who sends
// has them so, and who combines takes two at once. A word that is zero has not come: there is no counter, and nobody waits
// for more than the word itself; whoever has read one makes it zero again. Zero is sent as -0, which counts as much.
struct Mail {
    static constexpr int A_LANE = 2, COLUMNS = 4 * A_LANE, STATS = COLUMNS * HEADS, WORDS = STATS + 2 * HEADS;

    __device__ __forceinline__ static int words_of(int D) { return D / COLUMNS * WORDS; }  // of a piece
    // As many pieces as warps look at (launch.py has the number too).
    __device__ __forceinline__ static int room_for(int pieces) { return (pieces + 15) / 16 * 16; }
    __device__ __forceinline__ static u32* at(u32* of_team, int D, int piece, int part) {
        return of_team + (size_t)piece * words_of(D) + part * WORDS;
    }
    __device__ __forceinline__ static u32 letter(float v) { return v == 0.0f ? 0x80000000u : __float_as_uint(v); }
};

// A piece's mail, of a lane of the block that sends it.
template <int D>
struct Sending {
    static constexpr int PARTS = 16 * Spread<D>::J / Mail::COLUMNS;  // a warp's
    static_assert(PARTS <= 8);
    u32* own;

    __device__ __forceinline__ explicit Sending(const Team& team)
        : own(Mail::at(team.zeros, D, team.index, (threadIdx.x >> 5) * PARTS)) {
        make_opaque(own);
    }
    // Statistics, which are known before the values: whoever combines knows then what each piece counts.
    __device__ __forceinline__ void send(const Running (&of_head)[2]) const {
        const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
        const Stats even = of_head[0].stats(), odd = of_head[1].stats();
        if (g < PARTS)
            store_relaxed(reinterpret_cast<uint4*>(own + g * Mail::WORDS + Mail::STATS) + t,
                make_uint4(Mail::letter(even.x), Mail::letter(even.y), Mail::letter(odd.x), Mail::letter(odd.y)));
    }
    __device__ __forceinline__ void send(const Columns<Spread<D>::J>& total) const {
        const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
        for (int j = 0; j < Spread<D>::J; ++j)
            store_relaxed(reinterpret_cast<uint4*>(own + (2 * j + (g >> 2)) * Mail::WORDS) + (g & 3) * (HEADS / 2) + t,
                make_uint4(Mail::letter(total[j][0]), Mail::letter(total[j][2]), Mail::letter(total[j][1]),
                           Mail::letter(total[j][3])));
    }
};

// Groups, as lanes leave them for the first of the warps that combine the same columns; it looks at as many as a row may have.
struct Groups {
    float2 total[2 * MAX_GROUPS][32];
    Stats stats[2 * MAX_GROUPS][32];
};

// Combines the same columns by one warp, or by two or more: a lane one head of A_LANE of them. By a block without a piece, the
// ``index``-th of them.
template <int D>
__device__ __noinline__ void combine_columns(Groups* groups, bf16* out, const bf16* gate, int heads, u32* mail, int sharing,
                                             int pieces, int index) {
    constexpr int BLOCK_WARPS = Spread<D>::WARPS, OWN_GROUPS = MAX_GROUPS / BLOCK_WARPS, OWN = OWN_GROUPS * GROUP;  // of a warp
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int warps = sharing > 4 * OWN ? 8 : sharing > 2 * OWN ? 4 : sharing > OWN ? 2 : 1;
    const int part = index * (BLOCK_WARPS / warps) + warp / warps, first = warp % warps * OWN, count = pieces - first;
    const int head = lane % HEADS;
    const bool is_first = first == 0, exists = is_first && head < heads;
    int place = head * D + part / 2 * 16 + part % 2 * 4 + lane / HEADS;
    u32* own = Mail::at(mail, D, first, part);
    make_opaque(place);
    make_opaque(own);
    bf16 gates[Mail::A_LANE] = {};
    if (exists && gate != nullptr)
#pragma unroll
        for (int c = 0; c < Mail::A_LANE; ++c) gates[c] = gate[place + 8 * c];

    // Stage 1: what each piece counts, while its values are not there. Mail has room for whole groups: what is beyond the
    // pieces is looked at too, since with a branch a look would wait for the one before; it is zero.
    float2 shares[OWN];
    if (count > 0) {
        uint2 stats[OWN];
        u32 missing;
        do {
            pause();  // they come late, and a block that reads a cache shares this multiprocessor
            missing = 0;
#pragma unroll
            for (int i = 0; i < OWN; ++i)
                stats[i] = load_relaxed(reinterpret_cast<const uint2*>(own + i * Mail::words_of(D) + Mail::STATS) + head);
#pragma unroll
            for (int i = 0; i < OWN; ++i) missing |= i < count && (stats[i].x == 0 || stats[i].y == 0);
        } while (__any_sync(0xffffffffu, missing != 0));
#pragma unroll
        for (int g = 0; g < OWN_GROUPS; ++g) {
            Running of_group;
#pragma unroll
            for (int i = g * GROUP; i < (g + 1) * GROUP; ++i) {
                const bool is_there = i < count;
                shares[i] = of_group.take(make_float2(is_there ? __uint_as_float(stats[i].x) : NO_TOP,
                                                      __uint_as_float(stats[i].y)));
            }
            groups->stats[warp * OWN_GROUPS + g][lane] = of_group.stats();
        }
    } else {
#pragma unroll
        for (int g = 0; g < OWN_GROUPS; ++g) {
            groups->stats[warp * OWN_GROUPS + g][lane] = make_float2(NO_TOP, 0.0f);
            groups->total[warp * OWN_GROUPS + g][lane] = make_float2(0.0f, 0.0f);
        }
    }
    __syncthreads();
    // Stage 2: the values, and zeros in their place. What each group counts is made while they are on their way; what other
    // warps have is read too, and left.
    const int all = warps * OWN_GROUPS, from = is_first ? warp * OWN_GROUPS : 0;
    // Looked for sooner most would not be there, and what was not in L2 either is fetched in vain.
    uint2 values[OWN];
    auto look_at_values = [&] {
#pragma unroll
        for (int i = 0; i < OWN; ++i) values[i] = load_relaxed(reinterpret_cast<const uint2*>(own + i * Mail::words_of(D)) + lane);
    };
    if (count > 0) look_at_values();
    float2 group_shares[MAX_GROUPS];
    float inverse = 0.0f, factors[Mail::A_LANE];
    bool is_zero = true;
    if (is_first) {
        Running whole;
        Stats of_groups[MAX_GROUPS];
#pragma unroll
        for (int g = 0; g < MAX_GROUPS; ++g) of_groups[g] = groups->stats[from + g][lane];
#pragma unroll
        for (int g = 0; g < MAX_GROUPS; ++g)
            group_shares[g] = whole.take(g < all ? of_groups[g] : make_float2(NO_TOP, 0.0f));
        inverse = __frcp_rn(whole.weight), is_zero = whole.stats().y <= 0.0f;
#pragma unroll
        for (int c = 0; c < Mail::A_LANE; ++c) factors[c] = sigmoid(__bfloat162float(gates[c]));
    }
    if (count > 0) {
        while (true) {
            u32 missing = 0;
#pragma unroll
            for (int i = 0; i < OWN; ++i) missing |= i < count && (values[i].x == 0 || values[i].y == 0);
            if (!__any_sync(0xffffffffu, missing != 0)) break;
            look_at_values();
        }
#pragma unroll
        for (int g = 0; g < OWN_GROUPS; ++g) {
            float2 total = {};
#pragma unroll
            for (int i = g * GROUP; i < (g + 1) * GROUP; ++i) {
                total.x = mix(total.x, __uint_as_float(values[i].x), shares[i]);
                total.y = mix(total.y, __uint_as_float(values[i].y), shares[i]);
            }
            groups->total[warp * OWN_GROUPS + g][lane] = total;
        }
        static_assert(Mail::WORDS % 4 == 0 && Mail::WORDS <= 4 * 32);
#pragma unroll
        for (int i = 0; i < OWN; ++i)
            if (lane < Mail::WORDS / 4)
                store_relaxed(reinterpret_cast<uint4*>(own + i * Mail::words_of(D)) + lane, make_uint4(0, 0, 0, 0));
    }
    __syncthreads();
    if (!is_first) return;
    float2 total = {};
#pragma unroll
    for (int g = 0; g < MAX_GROUPS; ++g) {
        const float2 of_group = groups->total[from + g][lane];
        total.x = mix(total.x, g < all ? of_group.x : 0.0f, group_shares[g]);
        total.y = mix(total.y, g < all ? of_group.y : 0.0f, group_shares[g]);
    }
    if (exists) {
        out[place] = finished(total.x, is_zero, inverse, gate != nullptr, factors[0]);
        out[place + 8] = finished(total.y, is_zero, inverse, gate != nullptr, factors[1]);
    }
}

// Which row, key head and eight of its query heads a block works on, and in which team. Grid: rows; key_heads *
// ceil(per_key / 8); blocks that have pieces, and with SPREAD those that combine columns.
struct BlockPlace {
    int row, key_head, head, heads;

    __device__ __forceinline__ explicit BlockPlace(int per_key) {
        const int groups = (per_key + HEADS - 1) / HEADS;
        row = blockIdx.x;
        key_head = groups == 1 ? blockIdx.y : blockIdx.y / groups;
        const int group = blockIdx.y - key_head * groups;
        head = key_head * per_key + group * HEADS;
        heads = min(HEADS, per_key - group * HEADS);
    }

    // With SPREAD there are ``most`` pieces.
    template <int D, bool SPREAD, bool IS_FRESH>
    __device__ __forceinline__ static Entries entries_of(const Cache& cache, const int* table, int count, int most) {
        const int tile = threadIdx.x / (SPREAD ? 32 * Spread<D>::HALVES : 32), step = most * TOKENS;
        const int token = (int)blockIdx.z * (SPREAD ? 1 : GROUP) * TOKENS + tile * TILE + threadIdx.x % TILE;
        Entries found{entry_of(cache, table, count, token), NOWHERE, NOWHERE};
        if (SPREAD) found.second = entry_of(cache, table, count, token + step);
        if (SPREAD && IS_FRESH) found.third = entry_of(cache, table, count, token + 2 * step);
        return found;
    }

    // This block's team; where several share a row it has mail, or scratch memory for ``most`` pieces and a counter.
    template <int D, bool SPREAD>
    __device__ __forceinline__ Team team_of(int sharing, int most, float* scratch, u32* zeros) const {
        const int groups = (most + GROUP - 1) / GROUP;
        const size_t team = (size_t)row * gridDim.y + blockIdx.y;
        return {(int)blockIdx.z, sharing, most, scratch + team * groups * Slice<D>::FLOATS,
                zeros + team * (SPREAD ? Mail::room_for(sharing) * Mail::words_of(D) : 1)};
    }
};
