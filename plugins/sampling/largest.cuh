// The largest logits of a row, sorted, in one block: what top-k and sampling look at nearly always.
//
// Several blocks share a row. Each warp looks once at its share and posts the largest logit of each of the SLOTS lanes that
// have the largest, with a bound of what else the lane has, as one word: it is written once and is not 0, so that it tells of
// itself: no fence, no counter, and one trip to L2. The block that merges waits for these words. The wanted-th of the
// largest that its own warps met is the floor of the row; what warps posted above it is complete, but for those
// whose bounds reach the floor as well, seldom any: their share is read again. What is listed so, a few more than are wanted, is
// sorted by counting what is ahead. Where too many are equal for a list, the merging block ranks the row alone.
#pragma once
#include "ranking.cuh"

constexpr int SLOTS = 4;  // words of a warp; launch.py says the same
constexpr int MOST_SHORT = 8;

__device__ __forceinline__ void post(u64* place, u64 word) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(place), "l"(word) : "memory");
}
__device__ __forceinline__ void posted(const u64* place, u64& a, u64& b) {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(place) : "memory");
}

// The largest key of this thread's share; ``last`` are the last pieces of it, from piece ``at`` on.
__device__ __forceinline__ u32 largest_key(const bf16* row, const Share& share, Pieces& last, int& at) {
    Pair largest = pair_of(~0u);
    at = share.first;
#pragma unroll 1
    while (true) {
        last.load_from(row, share, at);
#pragma unroll
        for (int i = 0; i < PARALLEL; ++i) largest = __hmax2(largest, largest_pair(last.raw[i]));
        if (at + PARALLEL * share.step >= share.pieces) return key_of(largest);
        at += PARALLEL * share.step;
    }
}

// Calls ``visit(index, is_only)`` for the logits of a thread's share whose key is at least ``reach``, the last pieces first,
// until it says true. What is said to be the only one is so.
template <class Visit>
__device__ __forceinline__ void each_reaching(const bf16* row, const Share& share, Pieces pieces, int at, u32 reach,
                                              Visit visit) {
    const Pair pair = pair_of_key(max(reach, LOWEST_KEY));
    const bool is_one_turn = at == share.first;
#pragma unroll 1
    while (true) {
        // Of each word of the four pieces one bit for the lower logit, and one 16 further for the upper one.
        u32 ones = 0;
#pragma unroll
        for (int i = 0; i < PARALLEL; ++i) {
            const u32 words[4] = {pieces.raw[i].x, pieces.raw[i].y, pieces.raw[i].z, pieces.raw[i].w};
#pragma unroll
            for (int word = 0; word < 4; ++word) ones |= __hge2_mask(pair_of(words[word]), pair) & 0x10001u << (4 * i + word);
        }
        const bool is_only = is_one_turn && (ones & (ones - 1)) == 0;
#pragma unroll 1
        for (; ones != 0; ones &= ones - 1) {
            const int bit = __ffs(ones) - 1, half = bit >> 4;
            const u32 index = (at + (bit >> 2 & 3) * share.step) * share.width + 2 * (bit & 3) + half;
            if (visit(index, is_only)) return;
        }
        at -= PARALLEL * share.step;
        if (at < share.first) return;
        pieces.load_from(row, share, at);
    }
}

// The largest of the lanes that have the SLOTS largest: key, the complement of the index, and 16 bits of the largest key
// that the lane or, without it, the warp may have besides; never 0.
__device__ __forceinline__ void post_largest(u64* posts, const bf16* row, const Share& share, int block, u32 own,
                                             const Pieces& last, int at) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 rest = own << 5 | (31 - lane), top;
    int slot = SLOTS;
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
        top = __reduce_max_sync(ALL_LANES, rest);
        if (rest == top) slot = i, rest = 0;
    }
    if (slot == SLOTS) return;
    const u32 reach = top >> 5;
    u32 best = 0, index = 0, other = max(reach, 2u) - 1;
    if (own > 0)
        each_reaching(row, share, last, at, reach, [&](u32 here, bool is_only) {
            const u32 key = is_only ? own : key_at(row, here);
            other = max(other, min(key, best));
            if (key > best) best = key, index = here;
            return other == own;  // all is said
        });
    post(posts + ((warp << share.row_bits) + block) * SLOTS + slot, (u64)own << 48 | (u64)~index << 16 | other);
}

// Lists the ``wanted`` largest, exactly, in the merging block, where the list of all that reach ``reach`` was too long, or too
// short for NaN: what is above the last key, then as many of the last by index.
__device__ __noinline__ void settle(const bf16* row, int V, u32 reach, int wanted) {
    const Share share(V, 0, 0);
    const Place place = place_of({row, nullptr, V, 0, 0}, wanted, reach + 1);
    const u32 last = place.all >= (u32)wanted ? place.key : reach;
    __syncthreads();
    if (threadIdx.x == 0) shared.listed = 0;
    __syncthreads();
    each_logit(row, share.width, share.first, share.step, share.pieces, last + 1, [&](u32 key, int index) {
        if (key > last) list_up(order_of(key, index));
    });
    __syncthreads();
    u64 before = shared.listed;  // fewer than wanted
#pragma unroll 1
    for (int first = 0; first < share.pieces && before < (u32)wanted; first += PARALLEL * THREADS) {
        const int begin = first + PARALLEL * threadIdx.x, end = min(begin + PARALLEL, share.pieces);
        u32 count = 0;
        each_logit(row, share.width, begin, 1, end, last, [&](u32 key, int) { count += key == last; });
        u64 all;
        u64 at = before + sum_up_to_thread(count, all) - count;
        each_logit(row, share.width, begin, 1, count ? end : begin, last, [&](u32 key, int index) {
            if (key == last && at < (u32)wanted) shared.list[at] = order_of(key, index);
            at += key == last;
        });
        before += all;
    }
    __syncthreads();
}

// By the merging block, of whose threads a warp has the same warps of all blocks: lists the ``wanted`` largest of the row and
// calls ``emit(place, order)`` for each of them, and a few more, each in one thread.
template <class Emit>
__device__ __forceinline__ void merge_largest(u64* posts, const bf16* row, int V, const Share& share,
                                              int wanted, Emit emit) {
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    u64 words[SLOTS] = {};
    if (lane < share.blocks()) {
        u64* const from = posts + ((warp << share.row_bits) + lane) * SLOTS;
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
    // The largest of each warp's, and of these the wanted-th: a floor, since they are some of all.
    u64 keys = 0;
    u32 bound = key_in(words[SLOTS - 1]);
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
        keys = keys << 16 | key_in(words[i]);
        bound = max(bound, (u32)words[i] & 0xFFFFu);
    }
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
    if (thread < count) {
        const int own = shared.tops[thread];
        u32 ahead[4] = {};  // as one sum, each would wait for the last
#pragma unroll 1
        for (int i = 0; i < count; i += 8)
#pragma unroll
            for (int j = 0; j < 8; j += 4) {
                const int4 tops = *reinterpret_cast<const int4*>(&shared.tops[i + j]);
                ahead[0] += (u32)(own - tops.x) >> 31, ahead[1] += (u32)(own - tops.y) >> 31;
                ahead[2] += (u32)(own - tops.z) >> 31, ahead[3] += (u32)(own - tops.w) >> 31;
            }
        if ((ahead[0] + ahead[1]) + (ahead[2] + ahead[3]) + 1 == wanted) shared.reach = own >> 10;
    }
    __syncthreads();
    const u32 reach = max(shared.reach, 1u);
    const bool is_short = bound >= reach;
#pragma unroll
    for (int i = 0; i < SLOTS; ++i)
        if (!is_short && key_in(words[i]) >= reach) list_up(words[i] | 0xFFFFu);
    u32 shorts = __ballot_sync(ALL_LANES, is_short);
    // So many are short where many are equal.
    if (__popc(shorts) > MOST_SHORT) {
        if (lane == 0) atomicAdd(&shared.listed, LISTED + 1);
        shorts = 0;
    }
#pragma unroll 1
    for (; shorts != 0; shorts &= shorts - 1) {
        const Share theirs(V, share.row_bits, __ffs(shorts) - 1);
        const int turn = PARALLEL * theirs.step, at = theirs.first + max(theirs.pieces - 1 - theirs.first, 0) / turn * turn;
        Pieces pieces;
        pieces.load_from(row, theirs, at);
        each_reaching(row, theirs, pieces, at, reach,
                      [&](u32 index, bool) { return !list_up(order_of(key_at(row, index), index)); });
    }
    __syncthreads();
    int listed = shared.listed;
    if (listed > LISTED || listed < wanted) {
        settle(row, V, listed < wanted ? 0 : reach, wanted);
        listed = wanted;
    }
    // Each to its place; LANES threads count for one.
    constexpr int LANES = 8, EACH = 4;
#pragma unroll 1
    for (int begin = 0; begin < listed * LANES; begin += THREADS) {
        const int which = (begin + thread) / LANES, part = thread % LANES;
        const u64 own = shared.list[min(which, listed - 1)];
        u32 ahead = 0;
#pragma unroll 1
        for (int i = part; i < listed; i += LANES * EACH)
#pragma unroll
            for (int j = 0; j < EACH; ++j) ahead += i + j * LANES < listed && shared.list[i + j * LANES] > own;
#pragma unroll
        for (int distance = LANES / 2; distance > 0; distance /= 2) ahead += __shfl_xor_sync(ALL_LANES, ahead, distance);
        if (which < listed && part == 0) emit((int)ahead, own);
    }
}
