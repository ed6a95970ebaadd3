// The largest logits of a row, sorted, in one block: what top-k and sampling look at nearly always.
//
// Several blocks share a row. Each warp looks once at its share and posts the largest logit of each of the two or four lanes
// that have the largest, with a bound of what else the lane has, as one word: it is written once and is not 0, so that it
// tells of itself: no fence, no counter, and one trip to L2. The last word's bound is that of the lanes that post nothing as
// well. The block that merges waits for these words. The wanted-th of the largest that its own warps met is a floor of what
// is wanted. What reaches it and was posted is complete, but for the warps whose bounds reach it as well, seldom any: their
// share is read again. What is listed so, a few more than are wanted, is sorted by counting what is ahead. Where too many are
// equal for a list, the merging block looks at the row alone.
//
// It is not fetching code that takes the time: 512 instructions in a row take as long the first time as the second, and to go
// through the merging code once before it is needed saves nothing (H200). It is chains of instructions, each of which waits
// for the one before: what can be done side by side is, and what is seldom needed stands elsewhere.
#pragma once
#include "bf16.cuh"
#include "global_memory.cuh"
#include "opaque.cuh"
#include "ranking.cuh"

// Of a thread of the merging block: four of a warp; or, where more than 1 << WIDE_BITS blocks share a row, two of each of two.
// Then a row has pieces of 8 logits, at most two a thread (launch.py).
constexpr int WORDS = 4, WIDE_BITS = 5;
constexpr int MOST_SHORT = 8;
constexpr int FEW_A_WARP = 4, MOST_FEW = 24;  // a floor for up to so many is found among so many of a warp's largest
constexpr u32 LONGEST = 512;  // of a list that is sorted by counting

// The largest key of this thread's share; ``last`` are the last pieces of it, from piece ``at`` on. Where there is none, the
// first stands again.
template <class Meanwhile>
__device__ __forceinline__ u32 largest_key_of(const bf16* row, const Share& share, Pieces& last, int& at, Meanwhile meanwhile) {
    Pair largest = pair_of(~0u);
    const int first = share.first < share.pieces ? share.first : 0;
    at = share.first;
#pragma unroll 1
    while (true) {
#pragma unroll
        for (int i = 0; i < PARALLEL; ++i) {
            const int piece = at + i * share.step;
            last.raw[i] = reinterpret_cast<const uint4*>(row)[piece < share.pieces ? piece : first];
        }
        if (at == share.first) meanwhile();
#pragma unroll
        for (int i = 0; i < PARALLEL; ++i) largest = __hmax2(largest, largest_pair(last.raw[i]));
        if (at + PARALLEL * share.step >= share.pieces) return share.first < share.pieces ? key_of(largest) : 0;
        at += PARALLEL * share.step;
    }
}
// The same where a piece is one logit: out of the way of the usual.
struct Narrow {
    u32 own, words[PARALLEL];
    int at;
};
__device__ __noinline__ Narrow narrow_largest_key(const bf16* row, int V, int row_bits, int block) {
    const Share share(V, row_bits, block);
    Narrow narrow{0, {}, share.first};
    Pair largest = pair_of(~0u);
#pragma unroll 1
    while (true) {
        Pieces last;
        last.load_from(row, share, 1, narrow.at);
#pragma unroll
        for (int i = 0; i < PARALLEL; ++i) {
            narrow.words[i] = last.raw[i].x;
            largest = __hmax2(largest, pair_of(last.raw[i].x));
        }
        if (narrow.at + PARALLEL * share.step >= share.pieces) break;
        narrow.at += PARALLEL * share.step;
    }
    narrow.own = key_of(largest);
    return narrow;
}
template <class Meanwhile>
__device__ __forceinline__ u32 largest_key(const bf16* row, int V, const Share& share, int block, Pieces& last, int& at, Meanwhile meanwhile) {
    if (__builtin_expect(share.width == 8, 1)) return largest_key_of(row, share, last, at, meanwhile);
    meanwhile();
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

// One bit for each of the 16 logits of two pieces, in their order. Given are the bits of the lower one of each word, at even
// places, and those of the upper one, each 16 further.
__device__ __forceinline__ u32 in_order(u32 ones) { return (ones & 0xFFFFu) | (ones >> 15 & 0xFFFEu); }

// What a thread says of pieces that are all its share: its largest logit and a key that no other of it exceeds.
__device__ __forceinline__ u64 word_of(const Share& share, int at, const Pieces& pieces, u32 own) {
    const Pair top = pair_of_key(own);
    Pair others[PARALLEL];
    u32 ones[2] = {};
#pragma unroll
    for (int i = 0; i < PARALLEL; ++i) {
        const u32 words[4] = {pieces.raw[i].x, pieces.raw[i].y, pieces.raw[i].z, pieces.raw[i].w};
        others[i] = pair_of(~0u);
#pragma unroll
        for (int word = 0; word < 4; ++word) {
            const u32 equal = __heq2_mask(pair_of(words[word]), top);
            ones[i / 2] |= equal & 0x10001u << (8 * (i % 2) + 2 * word);
            others[i] = __hmax2(others[i], pair_of(words[word] | equal));  // NaN where it is equal
        }
    }
    // Of pieces that there are; a lane without a number has some index.
    const int count = (share.pieces - at + share.step - 1) >> (__ffs(THREADS) - 1 + share.row_bits);
    const u32 places = (in_order(ones[0]) | in_order(ones[1]) << 16) & ~0u >> (32 - 8 * min(max(count, 1), PARALLEL));
    const u32 other = key_of(__hmax2(__hmax2(others[0], others[1]), __hmax2(others[2], others[3])));
    const int place = max(__ffs(places), 1) - 1;
    const u32 index = (at + (place >> 3) * share.step) * share.width + (place & 7);
    return order_of(own, index, places & (places - 1) ? own : other);
}

// Posts the largest of the lanes that have the four largest, each with a key that no other of the lane exceeds, and with the
// last also nothing of lanes that post none. Returns the largest key of the thread's share. ``meanwhile`` is called once loads
// are on their way.
template <class Meanwhile>
__device__ __forceinline__ u32 post_wide(u64* posts, const bf16* row, int V, const Share& share, int block, Meanwhile meanwhile) {
    Pieces last;
    int at;
    const u32 own = largest_key(row, V, share, block, last, at, meanwhile);
    u64* place = posts + ((threadIdx.x / 32 << share.row_bits) + block) * WORDS;
    make_opaque(place);  // stays one number, to which the slot is added
    u32 rest = own << 5 | (31 - threadIdx.x % 32), top;
    int slot = -1;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
        top = __reduce_max_sync(ALL_LANES, rest);
        if (rest == top) slot = i, rest = 0;
    }
    u64 word = word_of(share, at, last, own);
    if (slot < 0) return own;
    if (at != share.first) {
        Largest largest{own, 0, 0, max(top >> 5, 2u) - 1};
        if (own > 0) largest = largest_of_turns(row, V, share.row_bits, block, top >> 5, largest);
        word = order_of(own, largest.index, largest.other);
    }
    if (slot == WORDS - 1) word = order_of(own, index_in(word), own);
    store_relaxed(place + slot, word);
    return own;
}

// Of two pairs of numbers, half by half, the largest, and the next; NaN is none.
struct Two {
    Pair top, next;
};
__device__ __forceinline__ Two two_of(Pair a, Pair b) { return {__hmax2(a, b), __hmin2_nan(a, b)}; }
__device__ __forceinline__ Two two_of(const Two& a, const Two& b) {
    return {__hmax2(a.top, b.top), __hmax2(__hmin2_nan(a.top, b.top), __hmax2(a.next, b.next))};
}
__device__ __forceinline__ Pair swapped(Pair pair) { return __lowhigh2highlow(pair); }
// Of both halves the larger one, and of two the next, in both halves.
__device__ __forceinline__ Pair top_of(Pair pair) { return __hmax2(pair, swapped(pair)); }
__device__ __forceinline__ Pair next_of(const Two& two) { return __hmax2(two.next, __hmin2_nan(two.top, swapped(two.top))); }
// The key of both halves, which are equal, in both halves; of NaN all ones.
__device__ __forceinline__ u32 twice_key_of(Pair both) {
    const u32 bits = bits_of(__hfma2(both, pair_of(0x3F803F80u), pair_of(0u)));  // -0 = 0
    u32 signs;
    asm("prmt.b32 %0, %1, 0, 0x9999;" : "=r"(signs) : "r"(bits));
    return bits ^ (signs | 0x80008000u);
}

// The same where a thread has two pieces at most: of two lanes.
template <class Meanwhile>
__device__ __forceinline__ u32 post_thin(u64* posts, const bf16* row, const Share& share, int block, Meanwhile meanwhile) {
    const int further = share.first + share.step;
    const uint4* const pieces = reinterpret_cast<const uint4*>(row);
    const uint4 first = pieces[share.first < share.pieces ? share.first : 0];
    const uint4 second = pieces[further < share.pieces ? further : 0];
    meanwhile();
    const Pair top_of_first = share.first < share.pieces ? largest_pair(first) : pair_of(~0u);
    const Two all = two_of(top_of_first, further < share.pieces ? largest_pair(second) : pair_of(~0u));
    const Pair own = top_of(all.top);
    u32 twice = twice_key_of(own);
    if (twice == ~0u) twice = 0;
    // Where it is, and what is next to it.
    const bool is_further = __hbneu2(top_of_first, own);
    const uint4 best = is_further ? second : first;
    const u32 words[4] = {best.x, best.y, best.z, best.w};
    u32 ones[2] = {0x80u, 0};  // a lane without a number has some index
#pragma unroll
    for (int i = 0; i < 4; ++i) ones[i / 2] |= __heq2_mask(pair_of(words[i]), own) & 0x20001u << (2 * i);
    const u32 places = ones[0] | ones[1];
    const u32 index = (is_further ? further : share.first) * 8 + __ffs(places | places >> 16) - 1;
    const Two two = two_of(two_of(pair_of(words[0]), pair_of(words[1])), two_of(pair_of(words[2]), pair_of(words[3])));
    const Pair next = __hmax2(top_of(__hmax2(next_of(two), next_of(all))), pair_of_key(LOWEST_KEY));
    u32 other = twice_key_of(next) & 0xFFFFu;
    u32 rest = (twice & 0xFFFF0000u) | (31 - threadIdx.x % 32);
    int slot = -1;
#pragma unroll
    for (int i = 0; i < 2; ++i)
        if (rest == __reduce_max_sync(ALL_LANES, rest)) slot = i, rest = 0;
    const u32 beyond = __reduce_max_sync(ALL_LANES, rest) >> 16;
    if (slot == 1) other = max(other, beyond);
    if (slot >= 0)
        store_relaxed(posts + ((threadIdx.x / 32 * WORDS << WIDE_BITS) + block * 2 + slot),
             (u64)((twice & 0xFFFF0000u) | ~index >> 16) << 32 | (~index << 16 | other));
    return twice >> 16;
}

template <class Meanwhile>
__device__ __forceinline__ u32 post_largest(u64* posts, const bf16* row, int V, const Share& share, int block, Meanwhile meanwhile) {
    return share.row_bits > WIDE_BITS ? post_thin(posts, row, share, block, meanwhile)
                                      : post_wide(posts, row, V, share, block, meanwhile);
}

// A lane of the merging block reads what its warp posted in one block, or in two.
__device__ __forceinline__ int lane_bits_of(int row_bits) { return min(row_bits, WIDE_BITS); }
__device__ __forceinline__ u64* posts_of_row(u64* posts, u32 m, int row_bits) {
    return posts + ((u64)m * (WARPS * WORDS) << lane_bits_of(row_bits));
}
// By the merging block, before it looks at the row, so that what was evicted since the last launch is there by then: 16 rows
// of 248320 took 6.44 us without on an H200, 5.96 so. One row alone evicts nothing.
__device__ __forceinline__ void fetch_posts(const u64* posts, int row_bits) {
    if (row_bits <= WIDE_BITS && threadIdx.x < WARPS * WORDS / 16 << row_bits)
        prefetch_l2(posts + 16 * threadIdx.x);
}
__device__ __forceinline__ void take_posts(u64* posts, int row_bits, u64 (&words)[WORDS]) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int lane_bits = lane_bits_of(row_bits);
    if (lane >> lane_bits) return;
    const bool has_two = row_bits > WIDE_BITS;
    u64* const from = posts + ((warp << lane_bits) * WORDS + lane * (has_two ? 2 : WORDS));
    u64* const more = from + (has_two ? 2 << WIDE_BITS : 2);
    u32 least;
    do {
        load_relaxed(from, words[0], words[1]);
        load_relaxed(more, words[2], words[3]);
        least = ~0u;
#pragma unroll
        for (int i = 0; i < WORDS; ++i) least = min(least, (u32)(words[i] >> 32));  // an index is below 2^31
    } while (least == 0);
    *reinterpret_cast<ulonglong2*>(from) = *reinterpret_cast<ulonglong2*>(more) = make_ulonglong2(0, 0);
}
// By the merging block where it needs none.
__device__ __noinline__ void leave_posts(u64* posts, int row_bits) {
    u64 words[WORDS];
    take_posts(posts, row_bits, words);
}

// Of some pieces of a row: lists up what is above ``last``, or else returns how many equal it, and puts those in the list that
// come to lie below ``end_of_list``, from ``at`` on.
__device__ __noinline__ u32 find_from(const bf16* row, int V, int first, int step, int end, u32 last, bool above, u32 at, u32 end_of_list) {
    u32 count = 0;
    each_logit(row, piece_width(V), first, step, end, last + above, [&](u32 key, int index) {
        if (above ? key <= last : key != last) return;
        if (above) list_up(order_of(key, index));
        else if (at + count < end_of_list) shared.list[at + count] = order_of(key, index);
        ++count;
    });
    return count;
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
            find_from(row, V, share.first, share.step, share.pieces, last, true, 0, 0);
        }
        __syncthreads();
        above = shared.listed;
        if (above <= LONGEST) break;
        last = place_of({row, nullptr, V, 0, 0}, wanted, last + 1).key;
    }
    u32 before = above;
#pragma unroll 1
    for (int first = 0; first < share.pieces && before < wanted; first += PARALLEL * THREADS) {
        const int begin = first + PARALLEL * threadIdx.x, end = min(begin + PARALLEL, share.pieces);
        const u32 count = find_from(row, V, begin, 1, end, last, false, 0, 0);  // first they are counted
        const ulonglong2 sums = sums_up_to_thread(count);
        find_from(row, V, begin, 1, end, last, false, before + sums.x - count, wanted);
        before += sums.y;
    }
    __syncthreads();
    return max(above, wanted);
}

// By a warp of the merging block: lists what reaches ``reach`` of its shares in those blocks where more does than was posted.
// Returns from which key on the words of this lane are to be listed: of the first 32 blocks, and of the others.
__device__ __noinline__ uint2 list_short(const bf16* row, int V, int row_bits, u32 reach, u32 bound, u32 further) {
    u32 least[2] = {reach, reach};
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
        const u32 own = half ? further : bound;
        u32 shorts = __ballot_sync(ALL_LANES, own >= reach), from = own >= reach ? HIGHEST_KEY : reach;
        // So many where many are equal: what is above these is complete all the same, or nothing is.
        if (__popc(shorts) > MOST_SHORT) {
            if (own > reach) atomicAdd(&shared.listed, LISTED + 1);
            if (threadIdx.x % 32 == 0) atomicOr(&shared.has_more, 1u);
            shorts = 0, from = reach + 1;
        }
        least[0] = half ? least[0] : from, least[1] = half ? from : least[1];
#pragma unroll 1
        for (; shorts != 0; shorts &= shorts - 1)
            each_reaching(row, Share(V, row_bits, __ffs(shorts) - 1 + 32 * half), reach,
                          [&](u32 index) { return !list_up(order_of(key_at(row, index), index)); });
    }
    return make_uint2(least[0], least[1]);
}

// The ``wanted``-th largest of one key a thread, if it is not 0.
__device__ __noinline__ u32 key_of_wanted(u32 own, int wanted) {
    u32 key = 0;
#pragma unroll 1
    for (u32 bit = 0x8000u; bit != 0; bit >>= 1)
        if (__syncthreads_count(own >= (key | bit)) >= wanted) key |= bit;
    return key;
}

// By the merging block, of whose threads a warp has the same warps of all blocks: lists the ``wanted`` largest of the row and
// a few more. Returns the number; ``largest`` gets the row's largest key where no more than MOST_FEW are wanted.
__device__ __forceinline__ u32 list_largest(u64* posts, const bf16* row, int V, int row_bits, int wanted, u32* largest = nullptr) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u64 words[WORDS] = {};  // each two sorted
    take_posts(posts, row_bits, words);
    // The largest of each warp's, and of these the wanted-th: a floor, since they are some of all.
    u32 reach;
    if (wanted <= MOST_FEW) {
        u32 rest[WORDS], kept = 0;
#pragma unroll
        for (int i = 0; i < WORDS; ++i) rest[i] = key_in(words[i]) << 5 | lane;
        const u32 second = min(rest[0], rest[2]), third = max(rest[1], rest[3]);
        rest[0] = max(rest[0], rest[2]), rest[3] = min(rest[1], rest[3]);
        rest[1] = max(second, third), rest[2] = min(second, third);
#pragma unroll
        for (int i = 0; i < FEW_A_WARP; ++i) {
            const u32 top = __reduce_max_sync(ALL_LANES, rest[0]);
            if (lane == i) kept = top >> 5;
            if (rest[0] == top) {
#pragma unroll
                for (int j = 1; j < WORDS; ++j) rest[j - 1] = rest[j];
                rest[WORDS - 1] = lane;
            }
        }
        if (lane < FEW_A_WARP) {
            shared.few[warp * FEW_A_WARP + lane] = bits_of(max(kept, LOWEST_KEY));
            shared.few_keys[warp * FEW_A_WARP + lane] = kept;
        }
        __syncthreads();
        // A lane has one of the 32, and counts those that are larger, two at a time.
        static_assert(WARPS * FEW_A_WARP == 32 && WORDS == 4);
        const u32 key = shared.few_keys[lane];
        const Pair twice = pair_of(shared.few[lane] * 0x10001u);
        Pair ahead[4] = {};  // as one sum, each would wait for the last
#pragma unroll
        for (int i = 0; i < WARPS * FEW_A_WARP / 8; ++i) {
            const uint4 raw = reinterpret_cast<const uint4*>(shared.few)[i];
            ahead[0] = __hadd2(ahead[0], __hgt2(pair_of(raw.x), twice));
            ahead[1] = __hadd2(ahead[1], __hgt2(pair_of(raw.y), twice));
            ahead[2] = __hadd2(ahead[2], __hgt2(pair_of(raw.z), twice));
            ahead[3] = __hadd2(ahead[3], __hgt2(pair_of(raw.w), twice));
        }
        const Pair all = __hadd2(__hadd2(ahead[0], ahead[1]), __hadd2(ahead[2], ahead[3]));
        const bool is_wanted = __low2float(all) + __high2float(all) < (float)wanted;
        if (largest) *largest = __reduce_max_sync(ALL_LANES, key);
        reach = max(__reduce_min_sync(ALL_LANES, is_wanted ? key : HIGHEST_KEY), 1u);
    } else {
        reach = max(key_of_wanted(max(key_in(words[0]), key_in(words[2])), wanted), 1u);
    }
    u32 bound = max((u32)words[0] & 0xFFFFu, (u32)words[1] & 0xFFFFu), further = max((u32)words[2] & 0xFFFFu, (u32)words[3] & 0xFFFFu);
    if (row_bits <= WIDE_BITS) bound = max(bound, further), further = 0;  // all of one block
    uint2 least = make_uint2(reach, reach);
    if (__any_sync(ALL_LANES, max(bound, further) >= reach)) {
        least = list_short(row, V, row_bits, reach, bound, further);
        if (row_bits <= WIDE_BITS) least.y = least.x;
    }
    if (key_in(words[0]) >= least.x) {
        list_up(words[0] | 0xFFFFu);
        if (key_in(words[1]) >= least.x) list_up(words[1] | 0xFFFFu);
    }
    if (key_in(words[2]) >= least.y) {
        list_up(words[2] | 0xFFFFu);
        if (key_in(words[3]) >= least.y) list_up(words[3] | 0xFFFFu);
    }
    __syncthreads();
    u32 listed = shared.listed;
    if (shared.has_more || listed > LONGEST || listed < (u32)wanted) listed = settle(row, V, reach, listed, wanted);
    return listed;
}

// Calls ``emit(place, order)`` for each that is listed, in one thread. A warp counts what is ahead of EACH at a time.
template <class Emit>
__device__ __forceinline__ void each_listed(u32 listed, Emit emit) {
    constexpr u32 EACH = 4;
    const u32 lane = threadIdx.x % 32;
#pragma unroll 1
    for (u32 begin = threadIdx.x / 32 * EACH; begin < listed; begin += WARPS * EACH) {
        u64 own[EACH];
        u32 ahead[EACH] = {};
#pragma unroll
        for (u32 i = 0; i < EACH; ++i) own[i] = shared.list[begin + i];
#pragma unroll 1
        for (u32 first = 0; first < listed; first += 32) {
            const u64 other = first + lane < listed ? shared.list[first + lane] : 0;
#pragma unroll
            for (u32 i = 0; i < EACH; ++i) ahead[i] += __popc(__ballot_sync(ALL_LANES, other > own[i]));
        }
#pragma unroll
        for (u32 i = 1; i < EACH; ++i)
            if (lane == i) own[0] = own[i], ahead[0] = ahead[i];
        if (lane < EACH && begin + lane < listed) emit(ahead[0], own[0]);
    }
}
