// The largest logits of a row, sorted, in one block: what top-k and sampling look at nearly always.
//
// Several blocks share a row. Each warp looks once at its share and posts the largest logit of each of the SLOTS lanes that
// have the largest, with a bound of what else the lane has, as one word: it is written once and is not 0, so that it tells of
// itself: no fence, no counter, and one trip to L2. The block that merges waits for these words. The wanted-th of the
// largest that its own warps met is a floor of what is wanted. What reaches it and was posted is complete, but for the warps
// whose bounds reach it as well, seldom any: their share is read again. What is listed so, a few more than are wanted, is
// sorted by counting what is ahead. Where too many are equal for a list, the merging block looks at the row alone.
//
// Most of the time goes where code is fetched for the first time: what is seldom needed stands elsewhere.
#pragma once
#include "ranking.cuh"

constexpr int SLOTS = 4;  // words of a warp; launch.py says the same
constexpr int MOST_SHORT = 8;
constexpr u32 FIRST_ANSWER = 500;  // clocks
constexpr u32 LONGEST = 512;  // of a list that is sorted by counting

__device__ __forceinline__ void post(u64* place, u64 word) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(place), "l"(word) : "memory");
}
__device__ __forceinline__ void posted(const u64* place, u64& a, u64& b) {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(place) : "memory");
}

// The largest key of this thread's share; ``last`` are the last pieces of it, from piece ``at`` on.
__device__ __forceinline__ u32 largest_key_of(const bf16* row, const Share& share, int width, Pieces& last, int& at) {
    Pair largest = pair_of(~0u);
    at = share.first;
#pragma unroll 1
    while (true) {
        last.load_from(row, share, width, at);
#pragma unroll
        for (int i = 0; i < PARALLEL; ++i) largest = __hmax2(largest, largest_pair(last.raw[i]));
        if (at + PARALLEL * share.step >= share.pieces) return key_of(largest);
        at += PARALLEL * share.step;
    }
}
// The same where a piece is one logit: out of the way of the usual.
struct Narrow {
    u32 own, words[PARALLEL];
    int at;
};
__device__ __noinline__ Narrow narrow_largest_key(const bf16* row, int V, int row_bits, int block) {
    Pieces last;
    Narrow narrow;
    narrow.own = largest_key_of(row, Share(V, row_bits, block), 1, last, narrow.at);
#pragma unroll
    for (int i = 0; i < PARALLEL; ++i) narrow.words[i] = last.raw[i].x;
    return narrow;
}
__device__ __forceinline__ u32 largest_key(const bf16* row, int V, const Share& share, int block, Pieces& last, int& at) {
    if (share.width == 8) return largest_key_of(row, share, 8, last, at);
    const Narrow narrow = narrow_largest_key(row, V, share.row_bits, block);
    at = narrow.at;
#pragma unroll
    for (int i = 0; i < PARALLEL; ++i) last.raw[i] = make_uint4(narrow.words[i], ~0u, ~0u, ~0u);
    return narrow.own;
}

// One bit for each logit of the pieces whose key is at least ``reach``: of each word one for the lower, and one 16 further for
// the upper one.
__device__ __forceinline__ u32 reaching(const Pieces& pieces, u32 reach) {
    const Pair pair = pair_of_key(max(reach, LOWEST_KEY));
    u32 ones = 0;
#pragma unroll
    for (int i = 0; i < PARALLEL; ++i) {
        const u32 words[4] = {pieces.raw[i].x, pieces.raw[i].y, pieces.raw[i].z, pieces.raw[i].w};
        u32 own = 0;  // as one chain, each would wait for the last
#pragma unroll
        for (int word = 0; word < 4; ++word) own |= __hge2_mask(pair_of(words[word]), pair) & 0x10001u << (4 * i + word);
        ones |= own;
    }
    return ones;
}
__device__ __forceinline__ u32 index_of_bit(const Share& share, int at, int bit) {
    return (at + (bit >> 2 & 3) * share.step) * share.width + 2 * (bit & 3) + (bit >> 4);
}

// Calls ``visit(index)`` for the logits of a thread's share whose key is at least ``reach``, until it says true.
template <class Visit>
__device__ __forceinline__ void each_reaching(const bf16* row, const Share& share, u32 reach, Visit visit) {
#pragma unroll 1
    for (int at = share.first; at < share.pieces; at += PARALLEL * share.step) {
        Pieces pieces;
        pieces.load_from(row, share, share.width, at);
#pragma unroll 1
        for (u32 ones = reaching(pieces, reach); ones != 0; ones &= ones - 1)
            if (visit(index_of_bit(share, at, __ffs(ones) - 1))) return;
    }
}

// A lane's largest logit, of which the key is known, and a key that no other of the lane exceeds.
struct Largest {
    u32 own, best, index, other;

    __device__ __forceinline__ bool take(u32 key, u32 here) {
        other = max(other, min(key, best));
        if (key > best) best = key, index = here;
        return other == own;  // all is said
    }
};
__device__ __noinline__ Largest largest_of_turns(const bf16* row, int V, int row_bits, int block, u32 reach, Largest largest) {
    each_reaching(row, Share(V, row_bits, block), reach, [&](u32 index) { return largest.take(key_at(row, index), index); });
    return largest;
}
// Lists what reaches ``reach`` of this warp's shares in some blocks.
__device__ __noinline__ void list_again(const bf16* row, int V, int row_bits, u32 blocks, u32 reach) {
#pragma unroll 1
    for (; blocks != 0; blocks &= blocks - 1)
        each_reaching(row, Share(V, row_bits, __ffs(blocks) - 1), reach,
                      [&](u32 index) { return !list_up(order_of(key_at(row, index), index)); });
}

// Posts the largest of the lanes that have the SLOTS largest, each with a key that no other of the lane exceeds.
__device__ __forceinline__ void post_largest(u64* posts, const bf16* row, int V, const Share& share, int block, u32 own,
                                             const Pieces& last, int at) {
    u32 rest = own << 5 | (31 - threadIdx.x % 32), top;
    int slot = -1;
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
        top = __reduce_max_sync(ALL_LANES, rest);
        if (rest == top) slot = i, rest = 0;
    }
    if (slot < 0) return;
    const u32 reach = top >> 5;
    Largest largest{own, 0, 0, max(reach, 2u) - 1};
    if (at != share.first) {
        if (own > 0) largest = largest_of_turns(row, V, share.row_bits, block, reach, largest);
    } else {
        u32 ones = reaching(last, reach);
        const bool is_only = (ones & (ones - 1)) == 0;
#pragma unroll 1
        for (; ones != 0; ones &= ones - 1) {
            const u32 index = index_of_bit(share, at, __ffs(ones) - 1);
            if (largest.take(is_only ? own : key_at(row, index), index)) break;
        }
    }
    post(posts + ((threadIdx.x / 32 << share.row_bits) + block) * SLOTS + slot, order_of(own, largest.index, largest.other));
}

// Lists at least the ``wanted`` largest, exactly, in the merging block, where what is listed of all that reach ``reach`` is too
// much, or too little for NaN, or has not all that are equal to it: what is above the last key, and as many as are wanted of the
// last by index. Returns the number.
__device__ __noinline__ u32 settle(const bf16* row, int V, u32 reach, u32 listed, u32 wanted) {
    const Share share(V, 0, 0);
    u32 last = shared.has_more || listed >= wanted ? reach : 0, above;
    // What is above the last is there, with equal ones.
    const bool is_listed = listed <= BINS;
    const u64 own = is_listed && threadIdx.x < listed ? shared.list[threadIdx.x] : 0;
#pragma unroll 1
    while (true) {
        __syncthreads();
        if (threadIdx.x == 0) shared.listed = 0;
        __syncthreads();
        if (is_listed) {
            if (key_in(own) > last) list_up(own);
        } else {
            each_logit(row, share.width, share.first, share.step, share.pieces, last + 1, [&](u32 key, int index) {
                if (key > last) list_up(order_of(key, index));
            });
        }
        __syncthreads();
        above = shared.listed;
        if (above <= LONGEST) break;
        last = place_of({row, nullptr, V, 0, 0}, wanted, last + 1).key;
    }
    u64 before = above;
#pragma unroll 1
    for (int first = 0; first < share.pieces && before < wanted; first += PARALLEL * THREADS) {
        const int begin = first + PARALLEL * threadIdx.x, end = min(begin + PARALLEL, share.pieces);
        u64 all, at = 0;
#pragma unroll 1
        for (int turn = 0; turn < 2; ++turn) {  // first they are counted
            u64 count = 0;
            each_logit(row, share.width, begin, 1, end, last, [&](u32 key, int index) {
                if (key != last) return;
                if (turn > 0 && at + count < wanted) shared.list[at + count] = order_of(key, index);
                ++count;
            });
            if (turn == 0) at = before + sum_up_to_thread(count, all) - count;
        }
        before += all;
    }
    __syncthreads();
    return max(above, wanted);
}

// By the merging block, of whose threads a warp has the same warps of all blocks: lists the ``wanted`` largest of the row and
// calls ``emit(place, order)`` for each of them, and a few more, each in one thread.
template <class Emit>
__device__ __forceinline__ void merge_largest(u64* posts, const bf16* row, int V, const Share& share,
                                              int wanted, Emit emit) {
    const u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    u64 words[SLOTS] = {};
    if (lane < (u32)share.blocks()) {
        u64* const from = posts + ((warp << share.row_bits) + lane) * SLOTS;
        // An answer that is asked for at once comes too early, and the next one a whole trip later.
        for (const u32 begun = clock(); (u32)clock() - begun < FIRST_ANSWER;) {}
        bool is_there = false;
        while (!is_there) {
            is_there = true;
#pragma unroll
            for (int i = 0; i < SLOTS; i += 2) posted(from + i, words[i], words[i + 1]);
#pragma unroll
            for (int i = 0; i < SLOTS; ++i) is_there = is_there && words[i] != 0;
        }
#pragma unroll
        for (int i = 0; i < SLOTS; i += 2) *reinterpret_cast<ulonglong2*>(from + i) = make_ulonglong2(0, 0);
    }
    u64 keys = 0;
    u32 bound = key_in(words[SLOTS - 1]);
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
        keys = keys << 16 | key_in(words[i]);
        bound = max(bound, (u32)words[i] & 0xFFFFu);
    }
    // The largest of each warp's, and of these the wanted-th: a floor, since they are some of all.
    const int each = (wanted + wanted / 2 + WARPS - 1) / WARPS, count = WARPS * each;
    static_assert(MOST_WANTED + MOST_WANTED / 2 <= THREADS && SLOTS == 4);
#pragma unroll 1
    for (int i = 0; i < each; ++i) {
        const u32 own = (u32)(keys >> 48) << 5 | lane, top = __reduce_max_sync(ALL_LANES, own);
        const int place = warp * each + i;
        if (lane == 0) shared.tops[place] = top >> 5 << 10 | place;
        if (own == top) keys <<= 16;
    }
    __syncthreads();
    if (thread < (u32)count) {
        const int own = shared.tops[thread];
        u32 ahead[4] = {};  // as one sum, each would wait for the last
#pragma unroll 1
        for (int i = 0; i < count; i += 8)
#pragma unroll
            for (int j = 0; j < 8; ++j) ahead[j % 4] += (u32)(own - (int)shared.tops[i + j]) >> 31;
        if ((ahead[0] + ahead[1]) + (ahead[2] + ahead[3]) + 1 == wanted) shared.reach = own >> 10;
    }
    __syncthreads();
    const u32 reach = max(shared.reach, 1u);
    u32 shorts = __ballot_sync(ALL_LANES, bound >= reach);
    // So many where many are equal: what is above these is complete all the same, or nothing is.
    const bool are_many = __popc(shorts) > MOST_SHORT;
    if (are_many) {
        if (bound > reach) atomicAdd(&shared.listed, LISTED + 1);
        if (lane == 0) atomicOr(&shared.has_more, 1u);
        shorts = 0;
    }
    if (shorts >> lane & 1) {
#pragma unroll
        for (int i = 0; i < SLOTS; ++i) words[i] = 0;
    }
    const u32 least = are_many ? reach + 1 : reach;
    // A thread's words are sorted.
#pragma unroll 1
    while (__any_sync(ALL_LANES, key_in(words[0]) >= least)) {
        if (key_in(words[0]) >= least) list_up(words[0] | 0xFFFFu);
#pragma unroll
        for (int i = 1; i < SLOTS; ++i) words[i - 1] = words[i];
        words[SLOTS - 1] = 0;
    }
    if (shorts != 0) list_again(row, V, share.row_bits, shorts, reach);
    __syncthreads();
    u32 listed = shared.listed;
    if (shared.has_more || listed > LONGEST || listed < (u32)wanted) listed = settle(row, V, reach, listed, wanted);
    // Each to its place; LANES threads count for one.
    constexpr int LANES = 8, EACH = 4;
#pragma unroll 1
    for (u32 begin = 0; begin < listed * LANES; begin += THREADS) {
        const u32 which = (begin + thread) / LANES, part = thread % LANES;
        const u64 own = shared.list[min(which, listed - 1)];
        u32 ahead = 0;
#pragma unroll 1
        for (u32 i = part; i < listed; i += LANES * EACH)
#pragma unroll
            for (int j = 0; j < EACH; ++j) ahead += i + j * LANES < listed && shared.list[i + j * LANES] > own;
#pragma unroll
        for (int distance = LANES / 2; distance > 0; distance /= 2) ahead += __shfl_xor_sync(ALL_LANES, ahead, distance);
        if (which < listed && part == 0) emit((int)ahead, own);
    }
}
