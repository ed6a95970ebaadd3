// The largest logits of a row, sorted, in one block: what top-k and sampling look at nearly always.
//
// Several blocks share a row, warp by warp in turns of 32 pieces. Each looks once: of the largest that its warps met, the
// ``least``-th is its floor, and what reaches that, a few more logits, it posts in global memory, where the block that
// merges waits for it. Every word of a post is written once and is not 0, so that it tells of itself: no fence, no counter,
// and one trip to L2. What reaches the highest floor of all is complete, and nearly always more than is wanted; it is sorted
// by counting what is ahead. The rows where it is less, or where too many are equal, are left to ranking.cuh.
#pragma once
#include "ranking.cuh"

constexpr int LISTED = sizeof(Ranking::list) / sizeof(u64);
constexpr int MOST_WANTED = 128;  // launch.py says the same
constexpr int ENTRIES = 1;  // of a block's posts, behind its header
constexpr u64 HEADER = 1ull << 33;  // and 1ull << 32 beside it: of entries the upper half is larger
constexpr u64 NO_ENTRY = ~0ull;

__device__ __forceinline__ void post(u64* place, u64 word) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(place), "l"(word) : "memory");
}
__device__ __forceinline__ u64 posted(const u64* place) {
    u64 word;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(place) : "memory");
    return word;
}
__device__ __forceinline__ u64 await_post(const u64* place, u64 word = 0) {
    while (word == 0) word = posted(place);
    return word;
}

// Without what the compiler adds to share one among the lanes of a warp.
__device__ __forceinline__ u32 count_up(u32& counter) {
    u32 before;
    asm volatile("atom.shared.add.u32 %0, [%1], 1;" : "=r"(before) : "r"((u32)__cvta_generic_to_shared(&counter)) : "memory");
    return before;
}
__device__ __forceinline__ void raise_to(u32& place, u32 value) {
    asm volatile("red.shared.max.u32 [%0], %1;" ::"r"((u32)__cvta_generic_to_shared(&place)), "r"(value) : "memory");
}

__device__ __forceinline__ u32 key_at(const bf16* logits, u32 index) {
    return key_of(*reinterpret_cast<const unsigned short*>(logits + index));
}

// What rises along the order: the complement of the key, then the index; never 0.
__device__ __forceinline__ u64 order_of(u32 key, u32 index) { return ((u64)(0xFFFFu - key) << 32) | index; }
__device__ __forceinline__ u32 key_in(u64 order) { return 0xFFFFu - (u32)(order >> 32); }

// The share of a row that a block has, and where its blocks post: ``places`` words each and, behind those of all, the mass
// of each. All are 0 before and after.
struct Share {
    u64* posts;
    int row_bits, blocks, block;
    int width, pieces;        // of a piece, of the row
    int first, step;          // of this thread's pieces
    int least, places, tops;  // a block's rank of its floor, words of its posts, and what its warps mark

    __device__ __forceinline__ Share(u64* all, int V, int row_bits, int stride)
        : row_bits(row_bits), blocks(1 << row_bits), block(blockIdx.x & (blocks - 1)), width(piece_width(V)),
          pieces(width == 8 ? V / 8 : V),
          first((((int)threadIdx.x / 32 << row_bits) + block) * 32 + threadIdx.x % 32), step(WARPS * 32 << row_bits) {
        posts = all + (size_t)(blockIdx.x >> row_bits) * stride;
    }
    // For the ``wanted`` largest of the row. A block has about its share of them, seldom 7 more than twice that.
    __device__ __forceinline__ void want(int wanted) {
        const int turns = (pieces + 31) / 32, busy = min(blocks, turns), warps = min(max(turns >> row_bits, 1), WARPS);
        least = min(wanted, 2 * ceil_div(wanted, busy) + 7);
        places = (ENTRIES + 2 * least + 31) / 32 * 32;
        tops = min(ceil_div(least + least / 2, warps), 32);
    }
    // Of small numbers: a quotient this close is exact, and a sixth of the instructions of any.
    __device__ __forceinline__ static int ceil_div(int a, int b) { return (int)__fdividef((float)(a + b) - 0.5f, (float)b); }
    __device__ __forceinline__ u64* mass(int block) const { return posts + blocks * places + block; }
    // The last cluster has the merging block: where blocks begin in order, all that it waits for have begun.
    __device__ __forceinline__ bool is_last_team() const { return block >= blocks - TEAM; }
    __device__ __forceinline__ bool merges() const { return block == blocks - TEAM; }
};

using Pair = __nv_bfloat162;
__device__ __forceinline__ Pair pair_of(u32 bits) { return *reinterpret_cast<const Pair*>(&bits); }

// Two of which one is the largest; NaN is passed over.
__device__ __forceinline__ Pair largest_pair(const uint4& raw) {
    return __hmax2(__hmax2(pair_of(raw.x), pair_of(raw.y)), __hmax2(pair_of(raw.z), pair_of(raw.w)));
}
__device__ __forceinline__ u32 key_of(Pair pair) {
    const u32 bits = *reinterpret_cast<const u32*>(&pair);
    return max(key_of(bits & 0xFFFFu), key_of(bits >> 16));
}

// A few pieces of this thread, whose loads are on their way together.
struct Pieces {
    uint4 raw[PARALLEL];

    __device__ __forceinline__ void load_from(const bf16* row, const Share& share, int at) {
#pragma unroll
        for (int i = 0; i < PARALLEL; ++i) {
            const int piece = at + i * share.step;
            raw[i] = load_piece(row, share.width, piece, piece < share.pieces);
        }
    }
};

// The largest key of this thread's share; ``last`` are the last pieces of it, from piece ``at`` on. All threads of the block;
// ``meanwhile`` is called once, while loads are on their way.
template <class Meanwhile>
__device__ __forceinline__ u32 largest_key(const bf16* row, const Share& share, Pieces& last, int& at, Meanwhile meanwhile) {
    Pair largest = pair_of(~0u);
    at = share.first;
    bool is_first = true;
#pragma unroll 1
    while (true) {
        last.load_from(row, share, at);
        if (is_first) meanwhile();
        is_first = false;
#pragma unroll
        for (int i = 0; i < PARALLEL; ++i) largest = __hmax2(largest, largest_pair(last.raw[i]));
        if (at + PARALLEL * share.step >= share.pieces) return key_of(largest);
        at += PARALLEL * share.step;
    }
}

// Calls ``visit(bits, index)`` for the logits of this thread's share that reach a pair of two equal ones, the last pieces
// first.
template <class Visit>
__device__ __forceinline__ void each_reaching(const bf16* row, const Share& share, Pieces pieces, int at, Pair reach,
                                              Visit visit) {
#pragma unroll 1
    while (true) {
        // Of each word of the four pieces one bit for the lower logit, and one 16 further for the upper one.
        u32 ones = 0;
#pragma unroll
        for (int i = 0; i < PARALLEL; ++i) {
            const u32 words[4] = {pieces.raw[i].x, pieces.raw[i].y, pieces.raw[i].z, pieces.raw[i].w};
#pragma unroll
            for (int word = 0; word < 4; ++word) ones |= __hge2_mask(pair_of(words[word]), reach) & 0x10001u << (4 * i + word);
        }
#pragma unroll 1
        for (; ones != 0; ones &= ones - 1) {
            const int bit = __ffs(ones) - 1, half = bit >> 4;
            const int index = (at + (bit >> 2 & 3) * share.step) * share.width + 2 * (bit & 3) + half;
            visit((u32)reinterpret_cast<const unsigned short*>(row)[index], index);
        }
        at -= PARALLEL * share.step;
        if (at < share.first) return;
        pieces.load_from(row, share, at);
    }
}

// --- the key of some rank among the largest that warps met: a bound from below, since they are some of all ---

constexpr int TOP_BITS = 10;  // of a place among them, so that no two are equal
static_assert(THREADS <= 1 << TOP_BITS);

// The ``each`` largest of a warp's keys, one a lane; 0 is none. All others of ``buckets`` are 0.
__device__ __forceinline__ void mark_tops(Ranking& shared, u32 key, int each) {
    const u32 lane = threadIdx.x % 32;
    u32 own = key << 5 | lane;
#pragma unroll 1
    for (int i = 0; i < each; ++i) {
        const u32 top = __reduce_max_sync(ALL_LANES, own), place = threadIdx.x / 32 * each + i;
        if (lane == 0) shared.buckets[place] = top >> 5 << TOP_BITS | place;
        if (own == top) own = lane;
    }
}

// The block meets before and after. ``ranked`` and ``largest`` stay where there is no such one.
__device__ __forceinline__ void rank_tops(const Ranking& shared, int each, u32 rank, u32& ranked, u32& largest) {
    const int count = WARPS * each;
    if ((int)threadIdx.x >= count) return;
    const int own = shared.buckets[threadIdx.x], key = own >> TOP_BITS;
    u32 ahead[4] = {};  // as one sum, each would wait for the last
#pragma unroll 1
    for (int i = 0; i < count; i += 16)
#pragma unroll
        for (int j = 0; j < 16; j += 4) {
            const int4 tops = *reinterpret_cast<const int4*>(&shared.buckets[i + j]);
            ahead[0] += (u32)(own - tops.x) >> 31, ahead[1] += (u32)(own - tops.y) >> 31;
            ahead[2] += (u32)(own - tops.z) >> 31, ahead[3] += (u32)(own - tops.w) >> 31;
        }
    const u32 all = (ahead[0] + ahead[1]) + (ahead[2] + ahead[3]);
    if (key != 0 && all + 1 == rank) ranked = key;
    if (key != 0 && all == 0) largest = key;
}

// --- the blocks of a row ---

// By all threads, before the block first meets; the cluster is awaited before anything is told.
__device__ __forceinline__ void begin_team(Ranking& shared) {
    shared.buckets[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
        shared.reached = shared.joint_floor = shared.joint_largest = shared.joint_count = 0;
        shared.floors[0] = shared.floors[1] = shared.largest = 0;
        expect_bytes(&shared.told, sizeof(shared.verdict));
    }
    cluster_arrive_relaxed();
}

constexpr u32 TOO_MANY = 1u << 16;  // beside a floor

// Posts what reaches the block's floor.
__device__ __forceinline__ void post_largest(Ranking& shared, const bf16* row, const Share& share, u32 own, const Pieces& last,
                                             int at) {
    const u32 reach = max(shared.floors[0], LOWEST_KEY);
    u64* const posts = share.posts + share.block * share.places;
    const int most = share.places - ENTRIES;
    if (own >= reach)
        each_reaching(row, share, last, at, pair_of(bits_of(reach) * 0x10001u), [&](u32 bits, int index) {
            const int place = count_up(shared.reached);
            if (place < most) post(posts + ENTRIES + place, order_of(key_of(bits), index));
        });
    __syncthreads();
    const int count = shared.reached;
    const u32 floor = shared.floors[0] | (count > most ? TOO_MANY : 0);
#pragma unroll 1
    for (int i = threadIdx.x; i < share.places; i += THREADS) {
        if (i == 0) post(posts, (u64)floor << 16 | shared.largest | HEADER);
        else if (i >= ENTRIES + count) post(posts + i, NO_ENTRY);
    }
}

// Brings all posts together, once they are there, and returns the largest key of those that this thread brought.
__device__ __forceinline__ u32 collect(Ranking& shared, const Share& share) {
    const int total = share.blocks * share.places;
    constexpr int AT_ONCE = 4;
    u32 own = 0, floor = 0, largest = 0;
#pragma unroll 1
    for (int first = threadIdx.x; first < total; first += AT_ONCE * THREADS) {
        u64 words[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            words[i] = first + i * THREADS < total ? posted(share.posts + first + i * THREADS) : NO_ENTRY;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int at = first + i * THREADS;
            if (at >= total) continue;
            u64 word = await_post(share.posts + at, words[i]);
            share.posts[at] = 0;
            if (word < 2 * HEADER) {
                floor = max(floor, (u32)(word >> 16) & 0x1FFFFu), largest = max(largest, (u32)word & 0xFFFFu);
                word = NO_ENTRY;
            }
            shared.list[at] = word;
            if (word != NO_ENTRY) own = max(own, key_in(word));
        }
    }
    // Headers stand at multiples of 32.
    if (threadIdx.x % 32 == 0) raise_to(shared.joint_floor, floor), raise_to(shared.joint_largest, largest);
    return own;
}

// By all blocks of a row: lists the largest, sorted, in the merging block, down to the ``wanted``-th or a little further (0:
// as far as that is complete), and returns there how many they are, fewer than are wanted if that cannot be said; elsewhere
// -1. ``joint_largest`` is the row's largest key. All threads of a block call ``between`` between posting and merging.
template <class Between>
__device__ __forceinline__ int list_largest(Ranking& shared, const bf16* row, const Share& share, u32 own, const Pieces& last,
                                            int at, int wanted, Between between) {
    int each = share.tops, rank = share.least;
#pragma unroll 1
    for (int phase = 0; phase < 2; ++phase) {  // first of a block, then of all: the code is fetched once
        mark_tops(shared, own, each);
        __syncthreads();
        rank_tops(shared, each, rank, shared.floors[phase], shared.largest);
        __syncthreads();
        if (phase > 0) break;
        shared.buckets[threadIdx.x] = 0;
        post_largest(shared, row, share, own, last, at);
        between();
        if (!share.merges()) return -1;
        own = collect(shared, share);
        each = min((wanted + wanted / 2 + WARPS - 1) / WARPS, 16), rank = wanted;
    }
    const int total = share.blocks * share.places;
    const u32 joint_floor = shared.joint_floor, reach = max(max(shared.floors[1], joint_floor), 1u);
    u64* const found = shared.list + total;
#pragma unroll 1
    for (int i = threadIdx.x; i < total; i += THREADS) {
        const u64 word = shared.list[i];
        if (word == NO_ENTRY || key_in(word) < reach) continue;
        const int place = count_up(shared.joint_count);
        if (place < LISTED - total) found[place] = word;
    }
    __syncthreads();
    const int count = shared.joint_count;
    if (joint_floor >= TOO_MANY || count > LISTED - total) return 0;
    // Each to its place; LANES threads count for one.
    constexpr int LANES = 8, EACH = 4;
#pragma unroll 1
    for (int begin = 0; begin < count * LANES; begin += THREADS) {
        const int which = (begin + threadIdx.x) / LANES, part = threadIdx.x % LANES;
        const u64 mine = found[min(which, count - 1)];
        u32 ahead = 0;
#pragma unroll 1
        for (int i = part; i < count; i += LANES * EACH)
#pragma unroll
            for (int j = 0; j < EACH; ++j) ahead += i + j * LANES < count && found[i + j * LANES] < mine;
#pragma unroll
        for (int distance = LANES / 2; distance > 0; distance /= 2) ahead += __shfl_xor_sync(ALL_LANES, ahead, distance);
        if (which < count && part == 0) shared.list[ahead] = mine;
    }
    __syncthreads();
    return count;
}

// What the merging block, rank 0, has to tell its cluster; all its threads say the same.
__device__ __forceinline__ u32 told(Ranking& shared, u32 rank, u32 verdict) {
    if (TEAM == 1) return verdict;
    if (rank == 0) {
        if (threadIdx.x > 0 && threadIdx.x < TEAM)
            store_to_rank(&shared.verdict, __uint_as_float(verdict), &shared.told, threadIdx.x);
        return verdict;
    }
    await_bytes(&shared.told);
    return __float_as_uint(shared.verdict);
}
