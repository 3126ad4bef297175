// Included by the copy of ggml-cpu's ops.cpp that .ci/llama_cpp.cmake makes. Attention of one row looks at the mask of each
// cell in use, one after the other, and most cells are other sequences'. This goes past those 32 at a time. What is added
// up, and in which order, stays as it is: results are the same to the bit.
#pragma once
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

// The engine looks for it: passing by a cell costs a fraction of what it does without.
extern "C" {
#if defined(_WIN32)
__declspec(dllexport)
#else
__attribute__((visibility("default")))
#endif
extern const int disco_masked_cells = 1;
}
