// How a context is cut into pieces, who has which, and how their results become one row.
//
// A context is cut by its length alone: its steps go round pieces, RANKS pieces that follow each other are a group. Pieces
// are taken in one after the other within a group, then groups. A row has the same bits however it is shared out:
//   one piece              the block that has it writes the result
//   few rows, sm_90 on     a cluster a group, a block a piece; the blocks push each other their columns of all heads
//   many rows              a block takes all pieces of a group, and group after group
// Where several groups have several owners, the last one to be done combines them.
#pragma once
#include "cache.cuh"
#include "cluster.cuh"

#if __CUDA_ARCH__ >= 900
constexpr int RANKS = 8;
#define SPREAD_BOUNDS __cluster_dims__(RANKS, 1, 1) __launch_bounds__(THREADS, 2)
#else
constexpr int RANKS = 1;  // without clusters a group is one piece
#define SPREAD_BOUNDS __launch_bounds__(THREADS, 2)
#endif
// A piece has at least so many tokens (launch.py has the number too).
constexpr int PIECE_TOKENS = 64;
constexpr bool HAS_CLUSTERS = RANKS > 1;

// --- instruction wrappers (PTX ISA 8.0) ---

// Shared memory of another block of the cluster.
__device__ __forceinline__ u32 address_in_rank(const void* p, int rank) {
    u32 address = (u32)__cvta_generic_to_shared(p);
#if __CUDA_ARCH__ >= 900
    asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
#endif
    return address;
}
// Both addresses are those of that block; its barrier counts the bytes.
__device__ __forceinline__ void push(u32 address, float2 v, u32 arrival) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(address),
                 "f"(v.x), "f"(v.y), "r"(arrival) : "memory");
#endif
}
__device__ __forceinline__ void push(u32 address, float4 v, u32 arrival) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
                 "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(arrival) : "memory");
#endif
}

// Adds to a counter of the device, and returns what it was. What this block wrote before, up to its last barrier, is there
// for whoever sees the sum; and so is here what others wrote before they added.
__device__ __forceinline__ int add_after_all(int* p, int value) {
    int before;
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;" : "=r"(before) : "l"(p), "r"(value) : "memory");
    return before;
}

// --- device functions ---

// -infinity: the score of what is not there.
__device__ __forceinline__ float no_score() { return __int_as_float(0xff800000); }

// How a row is cut, by its length alone: ``most`` is the same for all rows of a launch, and of every launch with these heads.
struct Cut {
    int pieces, groups;

    __device__ __forceinline__ Cut(int length, int most)
        : pieces(min(most, (length + PIECE_TOKENS - 1) / PIECE_TOKENS)), groups((pieces + RANKS - 1) / RANKS) {}
};

// A block among those that work on one row and key head: its first group, and how many take groups in turn; in a cluster
// its rank. ``slices`` holds what several of them have to combine, ``counts`` how many groups are done (for each rank).
struct Team {
    int rank, index, sharing, most;
    float* slices;
    int* counts;
};

// 2^x, where x <= 0 or -infinity: 2^-22 relative.
__device__ __forceinline__ float power(float x) { return exp2f(x); }

// What counts of a partial result among others whose largest score is ``top``.
__device__ __forceinline__ float share(float largest, float top) {
    return largest == no_score() ? 0.0f : power(__fsub_rn(largest, top));
}

// Largest score and sum of weights; a sum of -1 for what has a page outside the cache.
using Stats = float2;

// Partial results, taken in one after the other, of one head.
struct Running {
    float top = no_score(), weight = 0.0f;
    bool is_bad = false;

    // Returns what the values so far, and the new ones, count.
    __device__ __forceinline__ float2 take(Stats part) {
        const float largest = fmaxf(top, part.x), old_share = share(top, largest), new_share = share(part.x, largest);
        weight = __fmaf_rn(new_share, part.y, __fmul_rn(weight, old_share));
        top = largest;
        is_bad |= part.y < 0.0f;
        return make_float2(old_share, new_share);
    }
    __device__ __forceinline__ Stats stats() const { return make_float2(top, is_bad ? -1.0f : weight); }
};

__device__ __forceinline__ float mix(float total, float value, float2 shares) {
    return __fmaf_rn(shares.y, value, __fmul_rn(total, shares.x));
}
__device__ __forceinline__ float2 mix(float2 total, float2 value, float2 shares) {
    return make_float2(mix(total.x, value.x, shares), mix(total.y, value.y, shares));
}

// Two results as they are stored.
struct Finish {
    float inverse;
    bool is_zero;

    __device__ __forceinline__ Finish(Stats stats) : inverse(__frcp_rn(stats.y)), is_zero(stats.y <= 0.0f) {}

    __device__ __forceinline__ u32 operator()(float low, float high, bool is_gated, u32 gate) const {
        const u32 rounded = is_zero ? 0u : bf16_pair(__fmul_rn(low, inverse), __fmul_rn(high, inverse));
        if (!is_gated) return rounded;
        const float own = __uint_as_float(rounded << 16), other = __uint_as_float(rounded & 0xffff0000u);
        return bf16_pair(__fmul_rn(own, sigmoid(__uint_as_float(gate << 16))),
                    __fmul_rn(other, sigmoid(__uint_as_float(gate & 0xffff0000u))));
    }
};

// What a lane (g, t) = (lane / 4, lane % 4) of a warp has of the result: o[j] = {(2t, d), (2t + 1, d), (2t, d + 1),
// (2t + 1, d + 1)} as (head, d), d = 16 C warp + 2 C g + 2 j.
template <int C>
using Columns = float[C][4];

template <int C>
__device__ __forceinline__ int first_column() {
    return (threadIdx.x >> 5) * (CHUNK / WARPS) * C + ((threadIdx.x & 31) >> 2) * 2 * C;
}

// Partial results in those columns, taken in one after the other.
template <int C>
struct Held {
    Columns<C> total = {};
    Running of_head[2];  // 2t and 2t + 1

    __device__ __forceinline__ void take(const Columns<C>& part, const Stats (&stats)[2]) {
        const float2 shares[2] = {of_head[0].take(stats[0]), of_head[1].take(stats[1])};
#pragma unroll
        for (int j = 0; j < C; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) total[j][i] = mix(total[j][i], part[j][i], shares[i & 1]);
    }
};

// The gate in those columns of heads 2t and 2t + 1.
template <int C>
struct Gates {
    Words<C> of_head[2] = {};

    __device__ __forceinline__ void load(const Row& row) {
        if (row.gate == nullptr) return;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int head = 2 * (threadIdx.x & 3) + h;
            if (head < row.heads) load_words(of_head[h], row.gate + head * C * CHUNK + first_column<C>());
        }
    }
};

// Writes a row's result from where lanes have it.
template <int C>
__device__ __forceinline__ void write_row(const Row& row, const Columns<C>& total, const Stats (&stats)[2],
                                          const Gates<C>& gates) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int head = 2 * (threadIdx.x & 3) + h;
        if (head >= row.heads) continue;
        const Finish finish(stats[h]);
        Words<C> words;
#pragma unroll
        for (int j = 0; j < C; ++j)
            words.at[j] = finish(total[j][h], total[j][2 + h], row.gate != nullptr, gates.of_head[h].at[j]);
        *reinterpret_cast<Words<C>*>(row.out + head * C * CHUNK + first_column<C>()) = words;
    }
}
template <int C>
__device__ __forceinline__ void write_row(const Row& row, const Columns<C>& total, const Stats (&stats)[2]) {
    Gates<C> gates;
    gates.load(row);
    write_row<C>(row, total, stats, gates);
}

// What one group has of all heads: [HEADS, D], then statistics [RANKS, HEADS], of which each rank of a cluster writes its own.
template <int C>
struct Slice {
    static constexpr int D = C * CHUNK, FLOATS = HEADS * D + 2 * RANKS * HEADS;
    float* at;

    __device__ __forceinline__ Slice(const Team& team, int group) : at(team.slices + (size_t)group * FLOATS) {}
    __device__ __forceinline__ float* values(int head, int column) const { return at + head * D + column; }
    __device__ __forceinline__ Stats* stats(int rank, int head) const {
        return reinterpret_cast<Stats*>(at + HEADS * D) + rank * HEADS + head;
    }
};

// Whether this block, which has written ``added`` of ``all`` slices, is the last one to have done so.
__device__ __forceinline__ bool is_last(int* count, int added, int all) {
    __shared__ int before;
    __syncthreads();
    if (threadIdx.x == 0) {
        before = add_after_all(count, added);
        if (before + added == all) *count = 0;
    }
    __syncthreads();
    return before + added == all;
}

// What the blocks of a cluster push into each other's shared memory: pieces, of each head the columns that a rank combines.
template <int C, bool SPREAD>
struct Incoming {
    static constexpr int SENDERS = SPREAD ? RANKS : 1, COLUMNS = C * CHUNK / RANKS;
    alignas(16) float2 columns[SENDERS][SPREAD ? HEADS : 1][SPREAD ? COLUMNS / 2 : 1];
    Stats of_rank[SENDERS][SPREAD ? HEADS : 1];
    Arrival arrival;
    static constexpr int PIECE_BYTES = HEADS * (COLUMNS * 4 + (int)sizeof(Stats));  // that a rank gets of each piece
};

// Pushes the rank that combines them this lane's columns of a piece, and every rank the statistics.
template <int C, bool SPREAD>
__device__ __forceinline__ void push_piece(Incoming<C, SPREAD>& incoming, const Columns<C>& o, const Stats (&stats)[2],
                                           int rank) {
    const int t = threadIdx.x & 3, column = first_column<C>(), to = column / Incoming<C, SPREAD>::COLUMNS;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const u32 at = address_in_rank(&incoming.columns[rank][2 * t + h][column % Incoming<C, SPREAD>::COLUMNS / 2], to);
        const u32 arrival = address_in_rank(&incoming.arrival, to);
        if constexpr (C == 1) push(at, make_float2(o[0][h], o[0][2 + h]), arrival);
#pragma unroll
        for (int j = 0; j + 1 < C; j += 2)
            push(at + 8 * j, make_float4(o[j][h], o[j][2 + h], o[j + 1][h], o[j + 1][2 + h]), arrival);
    }
    const int lane = threadIdx.x & 31, other = threadIdx.x / 32 * 2 + (lane >> 2 & 1);  // 4 warps, 2 ranks each
    if (lane < 8 && other < RANKS)
#pragma unroll
        for (int h = 0; h < 2; ++h)
            push(address_in_rank(&incoming.of_rank[rank][2 * t + h], other), stats[h], address_in_rank(&incoming.arrival, other));
}

// The pair of columns of one head that a thread of a rank combines, and its gate.
template <int C, bool SPREAD>
struct RankColumns {
    static constexpr int PAIRS = Incoming<C, SPREAD>::COLUMNS / 2;
    int head, pair, column;
    bool exist;
    u32 gate = 0;

    __device__ __forceinline__ explicit RankColumns(int rank)
        : head(threadIdx.x / PAIRS), pair(threadIdx.x % PAIRS), column((rank * PAIRS + pair) * 2), exist(head < HEADS) {}
    __device__ __forceinline__ int place() const { return head * C * CHUNK + column; }
    __device__ __forceinline__ void load_gate(const Row& row) {
        if (row.gate != nullptr && head < row.heads) gate = *reinterpret_cast<const u32*>(row.gate + place());
    }
};

// A rank's columns of all heads: the pieces of the group, and of the last rank to be done the groups.
template <int C, bool SPREAD>
__device__ __forceinline__ void combine_ranks(const Incoming<C, SPREAD>& incoming, const RankColumns<C, SPREAD>& own,
                                              const Row& row, const Team& team, const Cut& cut) {
    constexpr int TOGETHER = 8;
    const int head = own.head, pair = own.pair, column = own.column;
    const bool has_columns = own.exist;
    const int pieces = min(RANKS, cut.pieces - team.index * RANKS);
    Running running;
    float2 total = make_float2(0.0f, 0.0f);
    if (has_columns) {
#pragma unroll
        for (int r = 0; r < RANKS; ++r)
            if (r < pieces) total = mix(total, incoming.columns[r][head][pair], running.take(incoming.of_rank[r][head]));
    }
    if (cut.groups > 1) {
        if (has_columns) {
            const Slice<C> slice(team, team.index);
            *reinterpret_cast<float2*>(slice.values(head, column)) = total;
            if (pair == 0) *slice.stats(team.rank, head) = running.stats();
        }
        if (!is_last(team.counts + team.rank, 1, cut.groups)) return;
        running = Running();
        total = make_float2(0.0f, 0.0f);
        if (has_columns) {
#pragma unroll 1
            for (int first = 0; first < cut.groups; first += TOGETHER) {
                Stats stats[TOGETHER];
                float2 values[TOGETHER];
#pragma unroll
                for (int i = 0; i < TOGETHER; ++i) {
                    if (first + i >= cut.groups) continue;
                    const Slice<C> slice(team, first + i);
                    stats[i] = __ldcg(slice.stats(team.rank, head));
                    values[i] = __ldcg(reinterpret_cast<const float2*>(slice.values(head, column)));
                }
#pragma unroll
                for (int i = 0; i < TOGETHER; ++i)
                    if (first + i < cut.groups) total = mix(total, values[i], running.take(stats[i]));
            }
        }
    }
    if (head >= row.heads) return;
    *reinterpret_cast<u32*>(row.out + own.place()) =
        Finish(running.stats())(total.x, total.y, row.gate != nullptr, own.gate);
}

// Writes a group's slice from where lanes have it, and takes one in from there.
template <int C>
__device__ __forceinline__ void write_slice(const Slice<C>& slice, const Held<C>& held) {
    const int t = threadIdx.x & 3;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int j = 0; j < C; ++j)
            *reinterpret_cast<float2*>(slice.values(2 * t + h, first_column<C>() + 2 * j)) =
                make_float2(held.total[j][h], held.total[j][2 + h]);
        if (threadIdx.x < 4) *slice.stats(0, 2 * t + h) = held.of_head[h].stats();
    }
}
template <int C>
__device__ __forceinline__ void take_slice(Held<C>& held, const Slice<C>& slice) {
    const int t = threadIdx.x & 3;
    Columns<C> part;
    Stats stats[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        stats[h] = __ldcg(slice.stats(0, 2 * t + h));
#pragma unroll
        for (int j = 0; j < C; ++j) {
            const float* const at = slice.values(2 * t + h, first_column<C>() + 2 * j);
            const float2 value = __ldcg(reinterpret_cast<const float2*>(at));
            part[j][h] = value.x, part[j][2 + h] = value.y;
        }
    }
    held.take(part, stats);
}

// Which row, key head and eight of its query heads a block works on, and in which team. Grid: sharing * rows * key_heads *
// ceil(per_key / 8), with SPREAD times RANKS; the first of every row first.
template <bool SPREAD>
struct BlockPlace {
    int row, key_head, head, heads, team, rank, index;

    __device__ __forceinline__ BlockPlace(int teams, int key_heads, int per_key) {
        const int groups = (per_key + HEADS - 1) / HEADS, ranks = SPREAD ? RANKS : 1, place = blockIdx.x / ranks;
        rank = blockIdx.x % ranks;
        index = place / teams;
        team = place % teams;
        const int group = team % groups;
        key_head = team / groups % key_heads;
        row = team / groups / key_heads;
        head = key_head * per_key + group * HEADS;
        heads = min(HEADS, per_key - group * HEADS);
    }

    // The first token of this block.
    __device__ __forceinline__ int first_token() const { return (index * RANKS + rank) * TOKENS; }

    // This block's team; where several share a row it has scratch memory for ``most`` pieces, and counters.
    template <int C>
    __device__ __forceinline__ Team team_of(int sharing, int most, float* slices, int* counts) const {
        const int groups = (most + RANKS - 1) / RANKS;
        return {rank, index, sharing, most, slices + (size_t)team * groups * Slice<C>::FLOATS, counts + team * RANKS};
    }
};
