// The largest logits of a row, sorted, in a single pass over the row. Top-k and sampling nearly always use this. Used
// by topk.cu and sample.cu. sm_80 and newer.
//
// Several blocks share a row, and the last of them merges. Each warp reads its slice once. Its two or four lanes with
// the largest logits each store a candidate: their largest logit, with an upper bound of the lane's other logits. The
// bound of the warp's last candidate also covers the lanes that store none. A candidate is one word, written once and
// never 0, so that the word itself signals its arrival: there is no fence and no counter, and L2 is crossed once.
//
// The merging block waits for these words. Among the largest logits of its own warps, the ``wanted``-th is a threshold:
// at least that many logits reach it. All candidates above the threshold go into a list. The list is complete, except
// for warps whose bound reaches the threshold too. Their slices are read again, which is rare. The list is slightly
// longer than wanted. It is sorted by counting the larger entries. If too many equal logits overflow the list, the
// merging block scans the row alone.
//
// Latency comes from dependent instructions, not from instruction fetch: a second pass over 512 instructions
// takes as long as the first, and a dry run of the merging code saves nothing (H200). Independent work therefore runs
// side by side, and rare cases are separate functions.
#pragma once
#include "bf16.cuh"
#include "global_memory.cuh"
#include "opaque.cuh"
#include "radix_select.cuh"

// Candidates of a thread of the merging block: four of one warp. If more than 1 << WIDE_BITS blocks share a row, two
// each of two warps. A row then has vectors of 8 logits, at most two a thread (launch.py).
constexpr int CANDIDATES = 4, WIDE_BITS = 5;
constexpr int MAX_RESCANS = 8;
constexpr int TOPS_PER_WARP = 4,
              MAX_FAST_K = 24;  // for up to MAX_FAST_K, the threshold comes from this many logits of each warp
constexpr u32 LONGEST = 512;    // a list that is sorted by counting

// The largest key of this thread's slice. ``last`` gets the last vectors of the slice, from vector ``at`` on. Missing
// vectors repeat the first. ``overlap`` is work to do while loads are in flight.
template <class Overlap>
__device__ __forceinline__ u32 largest_key_of(const bf16* row, const RowSlice& slice, Vectors& last, int& at,
                                              Overlap overlap) {
    Pair largest = pair_of(~0u);
    const int first = slice.first < slice.vecs ? slice.first : 0;
    at = slice.first;
#pragma unroll 1
    while (true) {
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int vec = at + i * slice.step;
            last.raw[i] = reinterpret_cast<const uint4*>(row)[vec < slice.vecs ? vec : first];
        }
        if (at == slice.first) overlap();
#pragma unroll
        for (int i = 0; i < LOADS; ++i) largest = __hmax2(largest, max_pair(last.raw[i]));
        if (at + LOADS * slice.step >= slice.vecs) return slice.first < slice.vecs ? key_of(largest) : 0;
        at += LOADS * slice.step;
    }
}
// The same for vectors of one logit, which are rare.
struct NarrowLargest {
    u32 own, words[LOADS];
    int at;
};
__device__ __noinline__ NarrowLargest largest_key_of_narrow_rows(const bf16* row, int V, int row_bits, int block) {
    const RowSlice slice(V, row_bits, block);
    NarrowLargest narrow{0, {}, slice.first};
    Pair largest = pair_of(~0u);
#pragma unroll 1
    while (true) {
        Vectors last;
        last.load_from(row, slice, 1, narrow.at);
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            narrow.words[i] = last.raw[i].x;
            largest = __hmax2(largest, pair_of(last.raw[i].x));
        }
        if (narrow.at + LOADS * slice.step >= slice.vecs) break;
        narrow.at += LOADS * slice.step;
    }
    narrow.own = key_of(largest);
    return narrow;
}
template <class Overlap>
__device__ __forceinline__ u32 largest_key(const bf16* row, int V, const RowSlice& slice, int block, Vectors& last,
                                           int& at, Overlap overlap) {
    if (__builtin_expect(slice.width == 8, 1)) return largest_key_of(row, slice, last, at, overlap);
    overlap();
    const NarrowLargest narrow = largest_key_of_narrow_rows(row, V, slice.row_bits, block);
    at = narrow.at;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) last.raw[i] = make_uint4(narrow.words[i], ~0u, ~0u, ~0u);
    return narrow.own;
}

// One bit for each logit with a key of at least ``threshold``: for the lower half of word i bit i, for the upper half
// bit i + 16.
__device__ __forceinline__ u32 mask_at_least(const Vectors& vecs, u32 threshold) {
    const Pair pair = pair_of_key(max(threshold, LOWEST_KEY));
    u32 ones = 0;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
        const u32 words[4] = {vecs.raw[i].x, vecs.raw[i].y, vecs.raw[i].z, vecs.raw[i].w};
        u32 own = 0;  // words do not wait for each other
#pragma unroll
        for (int word = 0; word < 4; ++word)
            own |= __hge2_mask(pair_of(words[word]), pair) & 0x10001u << (4 * i + word);
        ones |= own;
    }
    return ones;
}
__device__ __forceinline__ u32 index_of_bit(const RowSlice& slice, int at, int bit) {
    return (at + (bit >> 2 & 3) * slice.step) * slice.width + 2 * (bit & 3) + (bit >> 4);
}

// Calls ``visit(index)`` for the logits of a thread's slice with a key of at least ``threshold``, until it returns
// true.
template <class Visit>
__device__ __forceinline__ void for_each_at_least(const bf16* row, const RowSlice& slice, u32 threshold, Visit visit) {
#pragma unroll 1
    for (int at = slice.first; at < slice.vecs; at += LOADS * slice.step) {
        Vectors vecs;
        vecs.load_from(row, slice, slice.width, at);
#pragma unroll 1
        for (u32 ones = mask_at_least(vecs, threshold); ones != 0; ones &= ones - 1)
            if (visit(index_of_bit(slice, at, __ffs(ones) - 1))) return;
    }
}

// The largest logit of a lane, whose key ``own`` is known, and an upper bound of the lane's other keys.
struct LaneLargest {
    u32 own, best, index, other;

    __device__ __forceinline__ bool take(u32 key, u32 here) {
        other = max(other, min(key, best));
        if (key > best) best = key, index = here;
        return other == own;  // the bound cannot rise further
    }
};
__device__ __noinline__ LaneLargest lane_largest_from_memory(const bf16* row, int V, int row_bits, int block,
                                                             u32 threshold, LaneLargest largest) {
    for_each_at_least(row, RowSlice(V, row_bits, block), threshold,
                      [&](u32 index) { return largest.take(key_at(row, index), index); });
    return largest;
}

// One bit for each of the 16 logits of two vectors, in their order. The input has the lower halves of the words at even
// bits, and the upper halves 16 bits further.
__device__ __forceinline__ u32 in_order(u32 ones) { return (ones & 0xFFFFu) | (ones >> 15 & 0xFFFEu); }

// The candidate of a thread whose slice is in ``vecs``: its largest logit, and the largest of the others.
__device__ __forceinline__ u64 candidate_of(const RowSlice& slice, int at, const Vectors& vecs, u32 own) {
    const Pair top = pair_of_key(own);
    Pair others[LOADS];
    u32 ones[2] = {};
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
        const u32 words[4] = {vecs.raw[i].x, vecs.raw[i].y, vecs.raw[i].z, vecs.raw[i].w};
        others[i] = pair_of(~0u);
#pragma unroll
        for (int word = 0; word < 4; ++word) {
            const u32 equal = __heq2_mask(pair_of(words[word]), top);
            ones[i / 2] |= equal & 0x10001u << (8 * (i % 2) + 2 * word);
            others[i] = __hmax2(others[i], pair_of(words[word] | equal));  // equal ones become NaN
        }
    }
    // Only bits of existing vectors. A lane of NaN has any index.
    const int count = (slice.vecs - at + slice.step - 1) >> (__ffs(THREADS) - 1 + slice.row_bits);
    const u32 places = (in_order(ones[0]) | in_order(ones[1]) << 16) & ~0u >> (32 - 8 * min(max(count, 1), LOADS));
    const u32 other = key_of(__hmax2(__hmax2(others[0], others[1]), __hmax2(others[2], others[3])));
    const int place = max(__ffs(places), 1) - 1;
    const u32 index = (at + (place >> 3) * slice.step) * slice.width + (place & 7);
    return order_of(own, index, places & (places - 1) ? own : other);
}

// Stores the candidates of the lanes with the four largest logits. The bound of the last one also covers all lanes
// without a candidate. Returns the largest key of the thread's slice. ``overlap`` is called once loads are in flight.
template <class Overlap>
__device__ __forceinline__ u32 post_four_candidates(u64* candidates, const bf16* row, int V, const RowSlice& slice,
                                                    int block, Overlap overlap) {
    Vectors last;
    int at;
    const u32 own = largest_key(row, V, slice, block, last, at, overlap);
    u64* place = candidates + ((threadIdx.x / 32 << slice.row_bits) + block) * CANDIDATES;
    make_opaque(place);  // computed once; slots are offsets
    u32 rest = own << 5 | (31 - threadIdx.x % 32), top;
    int slot = -1;
#pragma unroll
    for (int i = 0; i < CANDIDATES; ++i) {
        top = __reduce_max_sync(ALL_LANES, rest);
        if (rest == top) slot = i, rest = 0;
    }
    u64 word = candidate_of(slice, at, last, own);
    if (slot < 0) return own;
    if (at != slice.first) {
        LaneLargest largest{own, 0, 0, max(top >> 5, 2u) - 1};
        if (own > 0) largest = lane_largest_from_memory(row, V, slice.row_bits, block, top >> 5, largest);
        word = order_of(own, largest.index, largest.other);
    }
    if (slot == CANDIDATES - 1) word = order_of(own, index_in(word), own);
    store_relaxed(place + slot, word);
    return own;
}

// In each half of two pairs: the largest and the second largest. NaN is ignored.
struct Two {
    Pair top, next;
};
__device__ __forceinline__ Two two_of(Pair a, Pair b) { return {__hmax2(a, b), __hmin2_nan(a, b)}; }
__device__ __forceinline__ Two two_of(const Two& a, const Two& b) {
    return {__hmax2(a.top, b.top), __hmax2(__hmin2_nan(a.top, b.top), __hmax2(a.next, b.next))};
}
__device__ __forceinline__ Pair swapped(Pair pair) { return __lowhigh2highlow(pair); }
// The larger half of a pair, and of two pairs the second largest value, both in both halves.
__device__ __forceinline__ Pair top_of(Pair pair) { return __hmax2(pair, swapped(pair)); }
__device__ __forceinline__ Pair next_of(const Two& two) {
    return __hmax2(two.next, __hmin2_nan(two.top, swapped(two.top)));
}
// The key of two equal halves, in both halves. NaN gives all ones.
__device__ __forceinline__ u32 twice_key_of(Pair both) {
    const u32 bits = bits_of(__hfma2(both, pair_of(0x3F803F80u), pair_of(0u)));  // -0 = 0
    u32 signs;
    asm("prmt.b32 %0, %1, 0, 0x9999;" : "=r"(signs) : "r"(bits));
    return bits ^ (signs | 0x80008000u);
}

// The same for at most two vectors a thread: candidates of two lanes.
template <class Overlap>
__device__ __forceinline__ u32 post_two_candidates(u64* candidates, const bf16* row, const RowSlice& slice, int block,
                                                   Overlap overlap) {
    const int further = slice.first + slice.step;
    const uint4* const vecs = reinterpret_cast<const uint4*>(row);
    const uint4 first = vecs[slice.first < slice.vecs ? slice.first : 0];
    const uint4 second = vecs[further < slice.vecs ? further : 0];
    overlap();
    const Pair top_of_first = slice.first < slice.vecs ? max_pair(first) : pair_of(~0u);
    const Two all = two_of(top_of_first, further < slice.vecs ? max_pair(second) : pair_of(~0u));
    const Pair own = top_of(all.top);
    u32 twice = twice_key_of(own);
    if (twice == ~0u) twice = 0;
    // The position of the largest, and the second largest.
    const bool is_further = __hbneu2(top_of_first, own);
    const uint4 best = is_further ? second : first;
    const u32 words[4] = {best.x, best.y, best.z, best.w};
    u32 ones[2] = {0x80u, 0};  // a lane of NaN has any index
#pragma unroll
    for (int i = 0; i < 4; ++i) ones[i / 2] |= __heq2_mask(pair_of(words[i]), own) & 0x20001u << (2 * i);
    const u32 places = ones[0] | ones[1];
    const u32 index = (is_further ? further : slice.first) * 8 + __ffs(places | places >> 16) - 1;
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
        store_relaxed(candidates + ((threadIdx.x / 32 * CANDIDATES << WIDE_BITS) + block * 2 + slot),
                      (u64)((twice & 0xFFFF0000u) | ~index >> 16) << 32 | (~index << 16 | other));
    return twice >> 16;
}

template <class Overlap>
__device__ __forceinline__ u32 post_candidates(u64* candidates, const bf16* row, int V, const RowSlice& slice,
                                               int block, Overlap overlap) {
    return slice.row_bits > WIDE_BITS ? post_two_candidates(candidates, row, slice, block, overlap)
                                      : post_four_candidates(candidates, row, V, slice, block, overlap);
}

// A lane of the merging block reads the candidates of its warp in one block, or in two.
__device__ __forceinline__ int lane_bits_of(int row_bits) { return min(row_bits, WIDE_BITS); }
__device__ __forceinline__ u64* candidates_of_row(u64* candidates, u32 m, int row_bits) {
    return candidates + ((u64)m * (WARPS * CANDIDATES) << lane_bits_of(row_bits));
}
// By the merging block, before it reads the row. Candidates that were evicted since the last launch are then in L2 in
// time: 16 rows of 248320 take 6.44 us without this on an H200, and 5.96 us with it. A single row evicts nothing.
__device__ __forceinline__ void prefetch_candidates(const u64* candidates, int row_bits) {
    if (row_bits <= WIDE_BITS && threadIdx.x < WARPS * CANDIDATES / 16 << row_bits)
        prefetch_l2(candidates + 16 * threadIdx.x);
}
__device__ __forceinline__ void take_candidates(u64* candidates, int row_bits, u64 (&words)[CANDIDATES]) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int lane_bits = lane_bits_of(row_bits);
    if (lane >> lane_bits) return;
    const bool has_two = row_bits > WIDE_BITS;
    u64* const from = candidates + ((warp << lane_bits) * CANDIDATES + lane * (has_two ? 2 : CANDIDATES));
    u64* const more = from + (has_two ? 2 << WIDE_BITS : 2);
    u32 least;
    do {
        load_relaxed(from, words[0], words[1]);
        load_relaxed(more, words[2], words[3]);
        least = ~0u;
#pragma unroll
        for (int i = 0; i < CANDIDATES; ++i)
            least = min(least, (u32)(words[i] >> 32));  // no word is 0, as an index is below 2^31
    } while (least == 0);
    *reinterpret_cast<ulonglong2*>(from) = *reinterpret_cast<ulonglong2*>(more) = make_ulonglong2(0, 0);
}
// By the merging block if it does not use them.
__device__ __noinline__ void drop_candidates(u64* candidates, int row_bits) {
    u64 words[CANDIDATES];
    take_candidates(candidates, row_bits, words);
}

// For some vectors of a row: appends the logits above ``last`` to the list, or counts the logits equal to it. Of the
// equal ones it writes those that belong below ``end_of_list`` to the list, from ``at`` on.
__device__ __noinline__ u32 scan_from(const bf16* row, int V, int first, int step, int end, u32 last, bool above,
                                      u32 at, u32 end_of_list) {
    u32 count = 0;
    for_each_logit(row, vector_width(V), first, step, end, last + above, [&](u32 key, int index) {
        if (above ? key <= last : key != last) return;
        if (above) append(order_of(key, index));
        else if (at + count < end_of_list) shared.list[at + count] = order_of(key, index);
        ++count;
    });
    return count;
}

// The exact fallback of the merging block: makes a list of at least the ``wanted`` largest. It runs if the list of
// logits above the threshold is too long, too short because of NaN, or lacks logits equal to the threshold. The list
// gets everything above the last key, and by rising index as many as needed of the last key. Returns the length.
__device__ __noinline__ u32 fallback(const bf16* row, int V, u32 threshold, u32 listed, u32 wanted) {
    const RowSlice slice(V, 0, 0);
    u32 last = shared.has_more || listed >= wanted ? threshold : 0, above;
    // All logits above the last are in the list, among equal ones.
    const bool is_listed = listed <= BINS;
    const u64 own = is_listed && threadIdx.x < listed ? shared.list[threadIdx.x] : 0;
#pragma unroll 1
    while (true) {
        __syncthreads();
        if (threadIdx.x == 0) shared.listed = 0;
        __syncthreads();
        if (is_listed) {
            if (key_in(own) > last) append(own);
        } else {
            scan_from(row, V, slice.first, slice.step, slice.vecs, last, true, 0, 0);
        }
        __syncthreads();
        above = shared.listed;
        if (above <= LONGEST) break;
        last = select_k({row, nullptr, V, 0, 0}, wanted, last + 1).key;
    }
    u32 before = above;
#pragma unroll 1
    for (int first = 0; first < slice.vecs && before < wanted; first += LOADS * THREADS) {
        const int begin = first + LOADS * threadIdx.x, end = min(begin + LOADS, slice.vecs);
        const u32 count = scan_from(row, V, begin, 1, end, last, false, 0, 0);  // count them first
        const ulonglong2 sums = inclusive_scan_over_block(count);
        scan_from(row, V, begin, 1, end, last, false, before + sums.x - count, wanted);
        before += sums.y;
    }
    __syncthreads();
    return max(above, wanted);
}

// By a warp of the merging block: appends the logits above ``threshold`` of its slices in the blocks with a bound above
// it. Returns the keys from which on this lane appends its own candidates: for the first 32 blocks, and for the others.
__device__ __noinline__ uint2 rescan_row(const bf16* row, int V, int row_bits, u32 threshold, u32 bound, u32 further) {
    u32 least[2] = {threshold, threshold};
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
        const u32 own = half ? further : bound;
        u32 incomplete = __ballot_sync(ALL_LANES, own >= threshold), from = own >= threshold ? HIGHEST_KEY : threshold;
        // Many equal logits. Above them the candidates are complete, or the fallback runs anyway.
        if (__popc(incomplete) > MAX_RESCANS) {
            if (own > threshold) atomicAdd(&shared.listed, LIST_SIZE + 1);
            if (threadIdx.x % 32 == 0) atomicOr(&shared.has_more, 1u);
            incomplete = 0, from = threshold + 1;
        }
        least[0] = half ? least[0] : from, least[1] = half ? from : least[1];
#pragma unroll 1
        for (; incomplete != 0; incomplete &= incomplete - 1)
            for_each_at_least(row, RowSlice(V, row_bits, __ffs(incomplete) - 1 + 32 * half), threshold,
                              [&](u32 index) { return !append(order_of(key_at(row, index), index)); });
    }
    return make_uint2(least[0], least[1]);
}

// The ``wanted``-th largest of one key a thread, if it is not 0.
__device__ __noinline__ u32 kth_largest_thread_key(u32 own, int wanted) {
    u32 key = 0;
#pragma unroll 1
    for (u32 bit = 0x8000u; bit != 0; bit >>= 1)
        if (__syncthreads_count(own >= (key | bit)) >= wanted) key |= bit;
    return key;
}

// By the merging block, whose warp i reads the candidates of warp i of all blocks: lists the ``wanted`` largest logits
// of the row, and a few more. Returns the length. ``largest`` gets the row's largest key if at most MAX_FAST_K are
// wanted.
__device__ __forceinline__ u32 collect_largest(u64* candidates, const bf16* row, int V, int row_bits, int wanted,
                                               u32* largest = nullptr) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u64 words[CANDIDATES] = {};  // two sorted pairs
    take_candidates(candidates, row_bits, words);
    // The threshold: the wanted-th of the largest logits of each warp.
    u32 threshold;
    if (wanted <= MAX_FAST_K) {
        u32 rest[CANDIDATES], kept = 0;
#pragma unroll
        for (int i = 0; i < CANDIDATES; ++i) rest[i] = key_in(words[i]) << 5 | lane;
        const u32 second = min(rest[0], rest[2]), third = max(rest[1], rest[3]);
        rest[0] = max(rest[0], rest[2]), rest[3] = min(rest[1], rest[3]);
        rest[1] = max(second, third), rest[2] = min(second, third);
#pragma unroll
        for (int i = 0; i < TOPS_PER_WARP; ++i) {
            const u32 top = __reduce_max_sync(ALL_LANES, rest[0]);
            if (lane == i) kept = top >> 5;
            if (rest[0] == top) {
#pragma unroll
                for (int j = 1; j < CANDIDATES; ++j) rest[j - 1] = rest[j];
                rest[CANDIDATES - 1] = lane;
            }
        }
        if (lane < TOPS_PER_WARP) {
            shared.warp_tops[warp * TOPS_PER_WARP + lane] = bits_of(max(kept, LOWEST_KEY));
            shared.warp_top_keys[warp * TOPS_PER_WARP + lane] = kept;
        }
        __syncthreads();
        // A lane has one of the 32 and counts the larger ones, two at a time.
        static_assert(WARPS * TOPS_PER_WARP == 32 && CANDIDATES == 4);
        const u32 key = shared.warp_top_keys[lane];
        const Pair twice = pair_of(shared.warp_tops[lane] * 0x10001u);
        Pair ahead[4] = {};  // four short sums instead of one long one
#pragma unroll
        for (int i = 0; i < WARPS * TOPS_PER_WARP / 8; ++i) {
            const uint4 raw = reinterpret_cast<const uint4*>(shared.warp_tops)[i];
            ahead[0] = __hadd2(ahead[0], __hgt2(pair_of(raw.x), twice));
            ahead[1] = __hadd2(ahead[1], __hgt2(pair_of(raw.y), twice));
            ahead[2] = __hadd2(ahead[2], __hgt2(pair_of(raw.z), twice));
            ahead[3] = __hadd2(ahead[3], __hgt2(pair_of(raw.w), twice));
        }
        const Pair all = __hadd2(__hadd2(ahead[0], ahead[1]), __hadd2(ahead[2], ahead[3]));
        const bool is_wanted = __low2float(all) + __high2float(all) < (float)wanted;
        if (largest) *largest = __reduce_max_sync(ALL_LANES, key);
        threshold = max(__reduce_min_sync(ALL_LANES, is_wanted ? key : HIGHEST_KEY), 1u);
    } else {
        threshold = max(kth_largest_thread_key(max(key_in(words[0]), key_in(words[2])), wanted), 1u);
    }
    u32 bound = max((u32)words[0] & 0xFFFFu, (u32)words[1] & 0xFFFFu),
        further = max((u32)words[2] & 0xFFFFu, (u32)words[3] & 0xFFFFu);
    if (row_bits <= WIDE_BITS) bound = max(bound, further), further = 0;  // all belong to one block
    uint2 least = make_uint2(threshold, threshold);
    if (__any_sync(ALL_LANES, max(bound, further) >= threshold)) {
        least = rescan_row(row, V, row_bits, threshold, bound, further);
        if (row_bits <= WIDE_BITS) least.y = least.x;
    }
    if (key_in(words[0]) >= least.x) {
        append(words[0] | 0xFFFFu);
        if (key_in(words[1]) >= least.x) append(words[1] | 0xFFFFu);
    }
    if (key_in(words[2]) >= least.y) {
        append(words[2] | 0xFFFFu);
        if (key_in(words[3]) >= least.y) append(words[3] | 0xFFFFu);
    }
    __syncthreads();
    u32 listed = shared.listed;
    if (shared.has_more || listed > LONGEST || listed < (u32)wanted)
        listed = fallback(row, V, threshold, listed, wanted);
    return listed;
}

// Calls ``emit(place, order)`` for each entry of the list, in one thread. ``place`` is the number of larger entries. A
// warp counts for EACH entries at a time.
template <class Emit>
__device__ __forceinline__ void for_each_ranked(u32 listed, Emit emit) {
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
