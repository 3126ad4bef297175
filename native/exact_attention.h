// Included by the copy of ggml-cpu's ops.cpp that native/llama_cpp.cmake makes, in place of its attention where values are F16 and
// keys BF16, as in engines whose answers are to be exact, or F16. ggml goes from cell to cell with the former, an exponential,
// a rescaling and a rounding to 16 bits at each, and in tiles with the latter, hidden cells and all. Here it is 32 cells of
// those that a row sees at a time, and sums are 32 bits wide. What is added up, and in which order, depends on the cells that
// the row sees and on nothing else: a row has the same bits however many rows there are, wherever its cells lie and whatever
// lies between them.
#pragma once
#include "masked_cells.h"

#include <cmath>

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__) && defined(__F16C__))
#define DISCO_ATTENDS 1
#include <immintrin.h>

#if defined(__AVX512F__)
using disco_floats = __m512;
static inline disco_floats disco_load(const float * p) { return _mm512_loadu_ps(p); }
static inline void disco_store(float * p, disco_floats x) { _mm512_storeu_ps(p, x); }
static inline disco_floats disco_all(float x) { return _mm512_set1_ps(x); }
static inline disco_floats disco_mul(disco_floats a, disco_floats b) { return _mm512_mul_ps(a, b); }
static inline disco_floats disco_add(disco_floats a, disco_floats b) { return _mm512_add_ps(a, b); }
static inline disco_floats disco_sub(disco_floats a, disco_floats b) { return _mm512_sub_ps(a, b); }
static inline disco_floats disco_max(disco_floats a, disco_floats b) { return _mm512_max_ps(a, b); }
static inline disco_floats disco_mul_add(disco_floats a, disco_floats b, disco_floats c) { return _mm512_fmadd_ps(a, b, c); }
static inline disco_floats disco_load_f16(const uint16_t * p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
}
static inline disco_floats disco_load_bf16(const uint16_t * p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
#else
using disco_floats = __m256;
static inline disco_floats disco_load(const float * p) { return _mm256_loadu_ps(p); }
static inline void disco_store(float * p, disco_floats x) { _mm256_storeu_ps(p, x); }
static inline disco_floats disco_all(float x) { return _mm256_set1_ps(x); }
static inline disco_floats disco_mul(disco_floats a, disco_floats b) { return _mm256_mul_ps(a, b); }
static inline disco_floats disco_add(disco_floats a, disco_floats b) { return _mm256_add_ps(a, b); }
static inline disco_floats disco_sub(disco_floats a, disco_floats b) { return _mm256_sub_ps(a, b); }
static inline disco_floats disco_max(disco_floats a, disco_floats b) { return _mm256_max_ps(a, b); }
static inline disco_floats disco_mul_add(disco_floats a, disco_floats b, disco_floats c) { return _mm256_fmadd_ps(a, b, c); }
static inline disco_floats disco_load_f16(const uint16_t * p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
}
static inline disco_floats disco_load_bf16(const uint16_t * p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
#endif

static constexpr int64_t DISCO_WIDE = sizeof(disco_floats) / sizeof(float);
static constexpr int64_t DISCO_CELLS = 32; // at a time
static constexpr int64_t DISCO_AHEAD = 16; // cells, whose keys are asked for early
static constexpr int64_t DISCO_MOST = 512; // numbers of a head
static constexpr int DISCO_ROWS = 4; // that go over the same cells together
static constexpr int DISCO_VECTORS = 4; // of a value's numbers at a time

// Of `n` so many at a time as registers allow with `R` rows.
template <int R>
static constexpr int disco_at_a_time(int n) {
    return DISCO_WIDE == 16 || R < 3 ? n : n/2;
}

// A row of a head: what it asks for, as BF16 if keys are, and, for what the processor cannot multiply so, as floats; how far it
// is, and what it has come to: the values' sum, each weighed by exp(score - most), and the sum of these weights.
struct disco_row_of_head {
    const uint16_t * mask;
    float slope, most, total;
    int64_t cell, n; // the next cell, and how many are up
    bool is_plain; // the mask adds nothing to those
    int32_t cells[DISCO_CELLS];
    alignas(64) float scores[DISCO_CELLS];
    alignas(64) uint16_t asked[DISCO_MOST];
    alignas(64) float wide[DISCO_MOST];
    alignas(64) float sums[DISCO_MOST];
};

struct disco_heads {
    int64_t n_key, n_value, n_cells;
    const char * keys;
    const char * values;
    size_t key_bytes, value_bytes;
    float scale, softcap;
    bool are_keys_f16; // else BF16
};

static inline __m128 disco_quarter(disco_floats x) {
#if defined(__AVX512F__)
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(x),
        _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)));
#else
    const __m256 half = x;
#endif
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

static inline float disco_sum(disco_floats x) {
    const __m128 quarter = disco_quarter(x), pair = _mm_hadd_ps(quarter, quarter);
    return _mm_cvtss_f32(_mm_hadd_ps(pair, pair));
}

// Whether the mask adds nothing at DISCO_CELLS cells.
static inline bool disco_shows_all(const uint16_t * mask) {
    uint64_t parts[DISCO_CELLS/4], any = 0;
    std::memcpy(parts, mask, sizeof parts);
    for (const uint64_t part : parts) {
        any |= part;
    }
    return !any;
}

// Takes up to DISCO_CELLS of the cells that a row sees, from where it is.
static inline void disco_take_cells(disco_row_of_head & row, int64_t end) {
    row.n = 0;
    row.is_plain = !row.mask;
    if (row.mask) {
        const disco_row & seen = disco_row_of(row.mask, 0, end);
        end = seen.last;
        row.cell = row.cell < seen.first ? seen.first : row.cell;
        row.is_plain = row.cell + DISCO_CELLS <= end && disco_shows_all(row.mask + row.cell);
    }
    if (row.is_plain) { // most of the time
        row.n = end - row.cell < DISCO_CELLS ? end - row.cell : DISCO_CELLS;
        for (int64_t i = 0; i < DISCO_CELLS; ++i) {
            row.cells[i] = (int32_t) (row.cell + i);
        }
        row.cell += row.n;
        return;
    }
    while (row.n < DISCO_CELLS && row.cell < end && (row.cell = disco_next_seen(row.mask, row.cell, end)) < end) {
        row.cells[row.n++] = (int32_t) row.cell++;
    }
}

// Asks early for what is in memory far away.
static inline void disco_fetch(const char * from, int64_t n) {
    for (int64_t at = 0; at < 2*n; at += 64) {
        _mm_prefetch(from + at, _MM_HINT_T0);
    }
}

// Multiplies the keys of cells with what `R` rows ask for.
template <int R, bool F16>
static inline void disco_score(const disco_heads & of, disco_row_of_head * rows, const int32_t * cells, int64_t n) {
    for (int64_t at = 0; at < n; at += 4) {
        const uint16_t * keys[4];
        for (int i = 0; i < 4; ++i) {
            const int64_t cell = cells[at + i < n ? at + i : n - 1];
            keys[i] = reinterpret_cast<const uint16_t *>(of.keys + cell*of.key_bytes);
            disco_fetch(of.keys + (cell + DISCO_AHEAD)*of.key_bytes, of.n_key); // mostly the next ones: a guess does no harm
            disco_fetch(of.values + cell*of.value_bytes, of.n_value);
        }
        static constexpr int n_cells = disco_at_a_time<R>(4);
        __m128 pairs[R][2];
        for (int first = 0; first < 4; first += n_cells) {
            disco_floats sums[R][n_cells];
            for (int r = 0; r < R; ++r) {
                for (int i = 0; i < n_cells; ++i) {
                    sums[r][i] = disco_all(0.0f);
                }
            }
            int64_t from = 0;
#if defined(__AVX512BF16__)
            for (; !F16 && from + 32 <= of.n_key; from += 32) {
                for (int i = 0; i < n_cells; ++i) {
                    const __m512bh key = (__m512bh) _mm512_loadu_si512(keys[first + i] + from);
                    for (int r = 0; r < R; ++r) {
                        sums[r][i] = _mm512_dpbf16_ps(sums[r][i], key, (__m512bh) _mm512_load_si512(rows[r].asked + from));
                    }
                }
            }
#endif
            for (; from < of.n_key; from += DISCO_WIDE) {
                for (int i = 0; i < n_cells; ++i) {
                    const uint16_t * at_key = keys[first + i] + from;
                    const disco_floats key = F16 ? disco_load_f16(at_key) : disco_load_bf16(at_key);
                    for (int r = 0; r < R; ++r) {
                        sums[r][i] = disco_mul_add(key, disco_load(rows[r].wide + from), sums[r][i]);
                    }
                }
            }
            for (int r = 0; r < R; ++r) {
                for (int i = 0; i < n_cells; i += 2) {
                    pairs[r][(first + i)/2] = _mm_hadd_ps(disco_quarter(sums[r][i]), disco_quarter(sums[r][i + 1]));
                }
            }
        }
        for (int r = 0; r < R; ++r) {
            _mm_store_ps(rows[r].scores + at, _mm_mul_ps(_mm_hadd_ps(pairs[r][0], pairs[r][1]), _mm_set1_ps(of.scale)));
        }
    }
}

static inline float disco_highest(const float * scores) {
    disco_floats highest = disco_load(scores);
    for (int64_t i = DISCO_WIDE; i < DISCO_CELLS; i += DISCO_WIDE) {
        highest = disco_max(highest, disco_load(scores + i));
    }
    alignas(64) float each[DISCO_WIDE];
    disco_store(each, highest);
    float found = each[0];
    for (int64_t i = 1; i < DISCO_WIDE; ++i) {
        found = each[i] > found ? each[i] : found;
    }
    return found;
}

// Makes weights of a row's scores.
static inline void disco_weigh(const disco_heads & of, disco_row_of_head & row) {
    if (of.softcap != 0.0f) {
        for (int64_t i = 0; i < row.n; ++i) {
            row.scores[i] = of.softcap*tanhf(row.scores[i]);
        }
    }
    if (!row.is_plain) {
        for (int64_t i = 0; i < row.n; ++i) {
            const uint16_t shown = row.mask[row.cells[i]];
            row.scores[i] += shown ? row.slope*GGML_CPU_FP16_TO_FP32(shown) : 0.0f;
        }
    }
    for (int64_t i = row.n; i < DISCO_CELLS; ++i) {
        row.scores[i] = row.scores[0];
    }
    const float highest = disco_highest(row.scores);
    if (highest > row.most) {
        const float less = expf(row.most - highest);
        for (int64_t i = 0; i < of.n_value; i += DISCO_WIDE) {
            disco_store(row.sums + i, disco_mul(disco_load(row.sums + i), disco_all(less)));
        }
        row.total *= less;
        row.most = highest;
    }
    for (int64_t i = 0; i < DISCO_CELLS; i += DISCO_WIDE) {
        disco_store(row.scores + i, ggml_v_expf(disco_sub(disco_load(row.scores + i), disco_all(row.most))));
    }
    for (int64_t i = row.n; i < DISCO_CELLS; ++i) {
        row.scores[i] = 0.0f;
    }
    disco_floats added = disco_load(row.scores);
    for (int64_t i = DISCO_WIDE; i < DISCO_CELLS; i += DISCO_WIDE) {
        added = disco_add(disco_load(row.scores + i), added);
    }
    row.total += disco_sum(added);
}

// Adds `N` vectors of each cell's value from number `at` on, by the weights of `R` rows.
template <int R, int N>
static inline void disco_add_values(
        const disco_heads & of, disco_row_of_head * rows, const int32_t * cells, int64_t n, int64_t at) {
    disco_floats sums[R][N];
    for (int r = 0; r < R; ++r) {
        for (int i = 0; i < N; ++i) {
            sums[r][i] = disco_load(rows[r].sums + at + i*DISCO_WIDE);
        }
    }
    for (int64_t c = 0; c < n; ++c) {
        const uint16_t * value = reinterpret_cast<const uint16_t *>(of.values + cells[c]*of.value_bytes) + at;
        disco_floats wide[N];
        for (int i = 0; i < N; ++i) {
            wide[i] = disco_load_f16(value + i*DISCO_WIDE);
        }
        for (int r = 0; r < R; ++r) {
            const disco_floats weight = disco_all(rows[r].scores[c]);
            for (int i = 0; i < N; ++i) {
                sums[r][i] = disco_mul_add(wide[i], weight, sums[r][i]);
            }
        }
    }
    for (int r = 0; r < R; ++r) {
        for (int i = 0; i < N; ++i) {
            disco_store(rows[r].sums + at + i*DISCO_WIDE, sums[r][i]);
        }
    }
}

// Goes over the cells that `R` rows have taken, which are the same.
template <int R>
static inline void disco_go_over(const disco_heads & of, disco_row_of_head * rows) {
    const int32_t * cells = rows->cells;
    const int64_t n = rows->n;
    if (of.are_keys_f16) {
        disco_score<R, true>(of, rows, cells, n);
    } else {
        disco_score<R, false>(of, rows, cells, n);
    }
    for (int r = 0; r < R; ++r) {
        disco_weigh(of, rows[r]);
    }
    static constexpr int n_vectors = disco_at_a_time<R>(DISCO_VECTORS);
    int64_t at = 0;
    for (; at + n_vectors*DISCO_WIDE <= of.n_value; at += n_vectors*DISCO_WIDE) {
        disco_add_values<R, n_vectors>(of, rows, cells, n, at);
    }
    for (; at < of.n_value; at += DISCO_WIDE) {
        disco_add_values<R, 1>(of, rows, cells, n, at);
    }
}

static inline void disco_go_over(const disco_heads & of, disco_row_of_head * rows, int n_rows) {
    switch (n_rows) {
        case 4: return disco_go_over<4>(of, rows);
        case 3: return disco_go_over<3>(of, rows);
        case 2: return disco_go_over<2>(of, rows);
        default: return disco_go_over<1>(of, rows);
    }
}

// Lets rows of heads with the same keys and values see their cells: together, where they see the same.
static void disco_attend(const disco_heads & of, disco_row_of_head * rows, int n_rows) {
    for (int r = 0; r < n_rows; ++r) {
        rows[r].most = -INFINITY;
        rows[r].total = 0.0f;
        rows[r].cell = 0;
        std::memset(rows[r].sums, 0, of.n_value*sizeof(float));
        for (int64_t i = 0; i < of.n_key && !of.are_keys_f16; i += DISCO_WIDE) {
            disco_store(rows[r].wide + i, disco_load_bf16(rows[r].asked + i));
        }
    }
    for (bool more = true; more;) {
        bool alike = true;
        more = false;
        for (int r = 0; r < n_rows; ++r) {
            disco_take_cells(rows[r], of.n_cells);
            more = more || rows[r].n;
            alike = alike && rows[r].n == rows[0].n
                && std::memcmp(rows[r].cells, rows[0].cells, rows[0].n*sizeof(int32_t)) == 0;
        }
        if (alike && more) {
            disco_go_over(of, rows, n_rows);
            continue;
        }
        for (int r = 0; r < n_rows; ++r) {
            if (rows[r].n) {
                disco_go_over<1>(of, rows + r);
            }
        }
    }
}

// Whether this attention suits: the numbers of a head, and the types.
static bool disco_attends(const ggml_tensor * dst) {
    const ggml_tensor * k = dst->src[1];
    const ggml_tensor * v = dst->src[2];
    const int64_t n_key = k->ne[0], n_value = v->ne[0];
    return dst->src[0]->type == GGML_TYPE_F32 && (k->type == GGML_TYPE_BF16 || k->type == GGML_TYPE_F16) && v->type == GGML_TYPE_F16
        && n_key % 16 == 0 && n_value % 16 == 0 && n_key <= DISCO_MOST && n_value <= DISCO_MOST;
}

// Attention of the rows from `first` to `end` of all heads, in the order of ggml_compute_forward_flash_attn_ext_f16_one_chunk,
// whose place it takes where disco_attends.
static void disco_attend_rows(ggml_tensor * dst, int64_t first, int64_t end, ggml_from_float_t to_bf16) {
    const ggml_tensor * q = dst->src[0];
    const ggml_tensor * k = dst->src[1];
    const ggml_tensor * v = dst->src[2];
    const ggml_tensor * mask = dst->src[3];
    const ggml_tensor * sinks = dst->src[4];
    disco_heads of = {};
    of.n_key = k->ne[0];
    of.n_value = v->ne[0];
    of.n_cells = k->ne[1];
    of.key_bytes = k->nb[1];
    of.value_bytes = v->nb[1];
    of.are_keys_f16 = k->type == GGML_TYPE_F16;
    float max_bias;
    std::memcpy(&of.scale, (const float *) dst->op_params + 0, sizeof(float));
    std::memcpy(&max_bias, (const float *) dst->op_params + 1, sizeof(float));
    std::memcpy(&of.softcap, (const float *) dst->op_params + 2, sizeof(float));
    if (of.softcap != 0.0f) {
        of.scale /= of.softcap;
    }
    const int64_t n_tokens = q->ne[1], n_heads = q->ne[2];
    const uint32_t n_head_log2 = 1u << (uint32_t) floor(log2(n_heads));
    const float m0 = powf(2.0f, -max_bias / n_head_log2), m1 = powf(2.0f, -(max_bias / 2.0f) / n_head_log2);
    // Heads that have the same keys, values and masks.
    const bool is_shared = n_heads / k->ne[2] == n_heads / v->ne[2] && (!mask || mask->ne[2] == 1);
    const int64_t n_sharing = is_shared ? n_heads / k->ne[2] : 1;
    const auto mask_of = [&](int64_t i3, int64_t head, int64_t token) {
        return mask ? (const uint16_t *) ((const char *) mask->data + token*mask->nb[1]
            + head % mask->ne[2]*mask->nb[2] + i3 % mask->ne[3]*mask->nb[3]) : nullptr;
    };
    // Whether a token's row begins where that of the one before it does: they are of one text.
    const auto goes_on = [&](int64_t i3, int64_t head, int64_t token) {
        return token > 0 && token < n_tokens && (!mask || disco_row_of(mask_of(i3, head, token - 1), 0, of.n_cells).first
            == disco_row_of(mask_of(i3, head, token), 0, of.n_cells).first);
    };
    static thread_local disco_row_of_head rows[DISCO_ROWS];
    const auto attend = [&](int64_t i3, int64_t head, int64_t token, int64_t n_of_heads, int64_t n_of_tokens) {
        const int64_t k2 = head / (n_heads / k->ne[2]), k3 = i3 / (q->ne[3] / k->ne[3]);
        const int64_t v2 = head / (n_heads / v->ne[2]), v3 = i3 / (q->ne[3] / v->ne[3]);
        of.keys = (const char *) k->data + k2*k->nb[2] + k3*k->nb[3];
        of.values = (const char *) v->data + v2*v->nb[2] + v3*v->nb[3];
        const int n = (int) (n_of_heads*n_of_tokens);
        for (int r = 0; r < n; ++r) {
            disco_row_of_head & row = rows[r];
            const int64_t h = head + r/n_of_tokens, t = token + r % n_of_tokens;
            row.mask = mask_of(i3, h, t);
            row.slope = max_bias <= 0.0f ? 1.0f : h < n_head_log2 ? powf(m0, h + 1) : powf(m1, 2*(h - n_head_log2) + 1);
            const float * asked = (const float *) ((const char *) q->data + t*q->nb[1] + h*q->nb[2] + i3*q->nb[3]);
            if (of.are_keys_f16) {
                std::memcpy(row.wide, asked, of.n_key*sizeof(float));
            } else {
                to_bf16(asked, row.asked, of.n_key);
            }
        }
        disco_attend(of, rows, n);
        for (int r = 0; r < n; ++r) {
            disco_row_of_head & row = rows[r];
            const int64_t h = head + r/n_of_tokens, t = token + r % n_of_tokens;
            float factor = 1.0f;
            if (sinks) {
                const float s = ((const float *) sinks->data)[h];
                if (s > row.most) {
                    factor = expf(row.most - s);
                    row.total = row.total*factor + 1.0f;
                } else {
                    row.total += expf(s - row.most);
                }
            }
            factor = row.total == 0.0f ? 0.0f : factor/row.total;
            float * to = (float *) ((char *) dst->data + (i3*n_heads*n_tokens + h + t*n_heads)*dst->nb[1]);
            for (int64_t i = 0; i < of.n_value; i += DISCO_WIDE) {
                disco_store(to + i, disco_mul(disco_load(row.sums + i), disco_all(factor)));
            }
        }
    };
    for (int64_t ir = first; ir < end;) {
        const int64_t i3 = ir / (n_heads*n_tokens), head = ir / n_tokens % n_heads, token = ir % n_tokens;
        int64_t n = 1;
        if (goes_on(i3, head, token) || goes_on(i3, head, token + 1)) { // rows of one text, a head after the other
            while (n < DISCO_ROWS && ir + n < end && goes_on(i3, head, token + n)) {
                ++n;
            }
            attend(i3, head, token, 1, n);
        } else { // a row of its own: its heads that have the same keys and values, if all of them are to be done here
            const int64_t number = head % n_sharing, before = ir - number*n_tokens;
            if (before < first || before + (n_sharing - 1)*n_tokens >= end) {
                attend(i3, head, token, 1, 1);
            } else if (number == 0) {
                for (int64_t done = 0; done < n_sharing; done += DISCO_ROWS) {
                    attend(i3, head + done, token, n_sharing - done < DISCO_ROWS ? n_sharing - done : DISCO_ROWS, 1);
                }
            }
        }
        ir += n;
    }
}
#endif

// The engine looks for it: attention rounds otherwise than ggml's own, so what one has computed is not the other's.
#if defined(DISCO_ATTENDS)
DISCO_TOLD(disco_exact_attention, 2)
#else
DISCO_TOLD(disco_exact_attention, 0)
#endif
