// Included by the copy of ggml-cpu's ops.cpp that native/llama_cpp.cmake makes. Attention of one row looks at the mask of each
// cell in use, one after the other, and most cells are other sequences'. This goes past those 32 at a time. What is added
// up, and in which order, stays as it is: results are the same to the bit.
#pragma once
#include "told.h"

#include <cstdint>
#include <cstring>

// The first cell from `cell` on, before `end`, that the mask (16-bit floats) does not hide; `end` where there is none.
static inline int64_t disco_next_seen(const uint16_t * mask, int64_t cell, int64_t end) {
    const uint16_t hidden = 0xFC00; // minus infinity
    const uint64_t hidden4 = 0xFC00FC00FC00FC00;
    if (mask[cell] != hidden) {
        return cell; // of its own cells, most
    }
    for (; cell + 32 <= end; cell += 32) {
        uint64_t masks[8], other = 0;
        std::memcpy(masks, mask + cell, sizeof masks);
        for (const uint64_t four : masks) {
            other |= four ^ hidden4;
        }
        if (other) {
            break;
        }
    }
    while (cell < end && mask[cell] == hidden) {
        ++cell;
    }
    return cell;
}

// The cells that a row sees are the same for each head of a layer: `first` is the first of those from `start` to `end`, and
// `last` is one behind the last. So the mask is read for the first head, and for the others no more than between these.
struct disco_row {
    const uint16_t * mask;
    uint64_t call;
    int64_t start, end, first, last;
};

static thread_local disco_row disco_rows[1024];
static thread_local uint64_t disco_call = 1; // each call of attention has another mask, maybe at the same place

static inline void disco_begin_call() {
    ++disco_call;
}

static inline const disco_row & disco_row_of(const uint16_t * mask, int64_t start, int64_t end) {
    disco_row & row = disco_rows[((reinterpret_cast<uintptr_t>(mask) >> 6) * 0x9E3779B97F4A7C15ull) >> 54];
    if (row.mask != mask || row.call != disco_call || row.start != start || row.end != end) {
        const int64_t first = start < end ? disco_next_seen(mask, start, end) : end;
        int64_t last = end;
        while (last - 32 >= first && disco_next_seen(mask, last - 32, last) == last) {
            last -= 32;
        }
        while (last > first && mask[last - 1] == 0xFC00) {
            --last;
        }
        row = { mask, disco_call, start, end, first, last };
    }
    return row;
}

// As disco_next_seen, for one that looks at all cells from `start` to `end` one after the other, and at `cell` now.
static inline int64_t disco_next_seen_by(const uint16_t * mask, int64_t cell, int64_t start, int64_t end) {
    const disco_row & row = disco_row_of(mask, start, end);
    if (cell >= row.last) {
        return end;
    }
    return cell <= row.first ? row.first : disco_next_seen(mask, cell, row.last);
}

// Whether a row sees none of the cells from `from` to `to`, of `end`.
static inline bool disco_sees_none(const uint16_t * mask, int64_t from, int64_t to, int64_t end) {
    const disco_row & row = disco_row_of(mask, 0, end);
    return to <= row.first || from >= row.last || disco_next_seen(mask, from, to) == to;
}

DISCO_TOLD(disco_masked_cells, 1) // passing by a cell costs a fraction of what it does without
