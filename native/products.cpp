// Compiled into ggml-cpu by native/llama_cpp.cmake, which renames llamafile_sgemm of sgemm.cpp to disco_other_products: what is to
// be multiplied comes here first.
#include "ggml-impl.h"
#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"
#include "llamafile/sgemm.h"
#include "k_products.h"
#include "told.h"

extern "C" bool disco_other_products(const ggml_compute_params *, int64_t, int64_t, int64_t, const void *, int64_t,
    const void *, int64_t, void *, int64_t, int, int, int);

#if defined(DISCO_MULTIPLIES)
// Whoever is done takes the next piece: some tiles with so many rows that their scales stay near.
//
// ggml calls this once for each slice of one operation, and a thread may be a slice ahead of another. So the pieces' counter is
// set to `nth` and seen so by all threads whenever a slice begins, as ggml itself does before the first. Each thread stops at
// the first piece beyond the last, so that who takes the very last number knows that no other will count any more: it sets the
// counter back, and nobody goes on before that.
template <typename W>
static void disco_multiply_all(const ggml_compute_params * params, disco_product of) {
    const int64_t most = disco_rows_at_once<W>(of.n_blocks);
    static thread_local std::vector<float> scales;
    const char * work = (const char *) params->wdata;
    const bool is_ready = work && of.rows >= work && of.rows < work + params->wsize; // ggml has packed these rows, and waited
    if (params->nth > 1 && !is_ready) {
        if (params->ith == 0) {
            ggml_threadpool_chunk_set(params->threadpool, params->nth);
        }
        ggml_barrier(params->threadpool);
    }
    const disco_product all = of;
    const int64_t n_parts = params->nth == 1 || of.n_tiles() < 4*params->nth ? params->nth : 4*params->nth;
    const int64_t n_pieces = n_parts*((all.n_rows + most - 1) / most); // one for each thread at least, where there are rows
    int64_t scaled = -1; // the first row whose scales these are
    for (int64_t piece = params->ith; piece < n_pieces;) {
        const int64_t row = piece/n_parts*most, part = piece % n_parts;
        of.rows = all.rows + row*all.row_bytes;
        of.n_rows = all.n_rows - row < most ? all.n_rows - row : most;
        of.to = all.to + row*all.to_stride;
        if (row != scaled) {
            scales.resize(W::SCALES*of.n_rows*of.n_blocks);
            disco_scales<W>(of.rows, of.row_bytes, of.n_rows, of.n_blocks, scales.data());
            of.scales = scales.data();
            scaled = row;
        }
        for (int64_t t = of.n_tiles()*part/n_parts; t < of.n_tiles()*(part + 1)/n_parts; ++t) {
            disco_multiply_tile<W>(of, t);
        }
        if (params->nth == 1) {
            ++piece;
            continue;
        }
        piece = ggml_threadpool_chunk_add(params->threadpool, 1);
        if (piece == n_pieces + params->nth - 1) {
            ggml_threadpool_chunk_set(params->threadpool, params->nth);
        }
    }
    if (params->nth > 1) {
        ggml_barrier(params->threadpool);
    }
}
#endif

#if defined(DISCO_PACKS)
// In place of llama.cpp's, which takes one number at a time.
extern "C" void disco_other_packing(const float *, void *, int64_t);
extern "C" void quantize_row_q8_K(const float * from, void * to, int64_t n) {
#if defined(DISCO_MULTIPLIES)
    disco_pack_k(from, (char *) to, n);
#else
    disco_other_packing(from, to, n);
#endif
}
#endif

// The type of the rows that weights of a type are multiplied with here, -1 where they are not.
static int disco_rows_of(int type) {
#if defined(DISCO_MULTIPLIES)
    switch (type) {
        case GGML_TYPE_Q4_1: return GGML_TYPE_Q8_1;
        case GGML_TYPE_Q4_0: case GGML_TYPE_Q8_0: case GGML_TYPE_IQ4_NL: case GGML_TYPE_MXFP4: return GGML_TYPE_Q8_0;
        case GGML_TYPE_Q4_K: case GGML_TYPE_Q5_K: case GGML_TYPE_Q6_K: return GGML_TYPE_Q8_K;
        default: break;
    }
#endif
    (void) type;
    return -1;
}

// repack.cpp asks this where it asks llama.cpp for AVX2, before it lays weights out for tiles of its own: what it would so lay out
// is multiplied here as it is in the file.
extern "C" int disco_interleaves(void) {
    return disco_rows_of(GGML_TYPE_Q4_K) < 0 && ggml_cpu_has_avx2();
}

#if defined(DISCO_MULTIPLIES)
// Calls `multiply` with the kind of a type's weights. Returns false where they are not multiplied here.
template <typename Call>
static bool disco_of_kind(int type, const Call & multiply) {
    switch (type) {
        case GGML_TYPE_Q4_1: multiply(disco_q4_1{}); return true;
        case GGML_TYPE_Q4_0: multiply(disco_q4_0{}); return true;
        case GGML_TYPE_Q8_0: multiply(disco_q8_0{}); return true;
        case GGML_TYPE_IQ4_NL: multiply(disco_iq4_nl{}); return true;
        case GGML_TYPE_MXFP4: multiply(disco_mxfp4{}); return true;
        case GGML_TYPE_Q4_K: multiply(disco_q4_k{}); return true;
        case GGML_TYPE_Q5_K: multiply(disco_q5_k{}); return true;
        case GGML_TYPE_Q6_K: multiply(disco_q6_k{}); return true;
        default: return false;
    }
}
#endif

#if defined(DISCO_OTHER_TILES)
// llama.cpp's tiles for many rows, which round otherwise than those for few: what they would take is multiplied here.
extern "C" bool disco_other_tiles(const ggml_compute_params *, ggml_tensor *);
extern "C" bool ggml_compute_forward_mul_mat_tiled(const ggml_compute_params * params, ggml_tensor * to) {
    return disco_rows_of(to->src[0]->type) < 0 && disco_other_tiles(params, to);
}

#if defined(DISCO_MULTIPLIES)
// The next expert behind this one that a row has chosen, -1 where there is none: ggml calls for one after the other.
static int64_t disco_next_expert(const ggml_tensor * ids, int64_t expert) {
    int64_t found = -1;
    for (int64_t batch = 0; batch < ids->ne[1]; ++batch) {
        for (int64_t place = 0; place < ids->ne[0]; ++place) {
            int32_t other;
            std::memcpy(&other, (const char *) ids->data + place*ids->nb[0] + batch*ids->nb[1], sizeof other);
            found = other > expert && (found < 0 || other < found) ? other : found;
        }
    }
    return found;
}

// This thread's part of the product of one expert with the `n_rows` rows that chose it. `chosen` has two numbers for each: its place
// among the experts that the row chose, and the row. ggml has packed the rows already, and waited.
template <typename W>
static void disco_multiply_expert(
        const ggml_compute_params * params, ggml_tensor * to, int64_t expert, int64_t n_rows, const int32_t * chosen) {
    static thread_local std::vector<float> scales;
    const ggml_tensor * weights = to->src[0], * from = to->src[1];
    disco_product of = {};
    of.n_blocks = weights->ne[0] / ggml_blck_size(weights->type);
    const int64_t most = disco_rows_at_once<W>(of.n_blocks);
    of.row_bytes = of.n_blocks*W::ROW_BYTES;
    of.weights_bytes = weights->nb[1];
    of.n_weights = weights->ne[1];
    const int64_t n_tiles = of.n_tiles();
    const int64_t first = n_tiles*params->ith/params->nth*DISCO_LANES, end = n_tiles*(params->ith + 1)/params->nth*DISCO_LANES;
    of.n_weights = (end < of.n_weights ? end : of.n_weights) - first;
    if (of.n_weights <= 0) {
        return;
    }
    of.weights = (const char *) weights->data + expert*weights->nb[2] + first*of.weights_bytes;
    if (n_rows <= 2) { // others are computed for longer than it takes to have the next one's first tile
        const int64_t next = disco_next_expert(to->src[2], expert);
        of.after = next < 0 ? nullptr : of.weights + (next - expert)*weights->nb[2];
    }
    float * places[DISCO_MOST];
    of.places = places;
    for (int64_t row = 0; row < n_rows; row += most) {
        const auto row_at = [&](int64_t i) {
            const int64_t place = chosen[2*(row + i)] % from->ne[1], batch = chosen[2*(row + i) + 1];
            return (const char *) params->wdata + (place + batch*from->ne[1])*of.row_bytes;
        };
        of.n_rows = n_rows - row < most ? n_rows - row : most;
        of.rows = row_at(0); // asked for where there is one alone
        scales.resize(W::SCALES*of.n_rows*of.n_blocks);
        disco_scales_of<W>(row_at, of.n_rows, of.n_blocks, scales.data());
        of.scales = scales.data();
        for (int64_t i = 0; i < of.n_rows; ++i) {
            char * column = (char *) to->data + chosen[2*(row + i)]*to->nb[1] + chosen[2*(row + i) + 1]*to->nb[2];
            places[i] = (float *) column + first;
        }
        for (int64_t t = 0; t < of.n_tiles(); ++t) {
            disco_multiply_tile<W>(of, t);
        }
    }
}
#endif

// The same for experts, each of whom has the rows that chose it. These come here with a single row, too.
extern "C" bool disco_other_expert_tiles(const ggml_compute_params *, ggml_tensor *, int64_t, int64_t, const int32_t *, char *);
extern "C" bool ggml_compute_forward_mul_mat_id_tiled(
        const ggml_compute_params * params, ggml_tensor * to, int64_t expert, int64_t n_rows, const int32_t * chosen, char * scratch) {
#if defined(DISCO_MULTIPLIES)
    const ggml_type type = to->src[0]->type;
    const bool is_ours = disco_rows_of(type) == ggml_get_type_traits_cpu(type)->vec_dot_type && to->src[1]->type == GGML_TYPE_F32;
    if (is_ours && !params->use_ref) {
        return disco_of_kind(type, [&](auto kind) { disco_multiply_expert<decltype(kind)>(params, to, expert, n_rows, chosen); });
    }
#endif
    return disco_other_expert_tiles(params, to, expert, n_rows, chosen, scratch);
}
#endif

// The product of `m` weight rows with `n` rows, `k` blocks each, as llamafile_sgemm has it. Returns false where it is left to
// ggml's dot products.
extern "C" bool llamafile_sgemm(const ggml_compute_params * params, int64_t m, int64_t n, int64_t k, const void * a,
        int64_t a_stride, const void * b, int64_t b_stride, void * c, int64_t c_stride, int a_type, int b_type, int c_type) {
#if defined(DISCO_MULTIPLIES)
    if (k > 0 && c_type == GGML_TYPE_F32 && disco_rows_of(a_type) == b_type) {
        return disco_of_kind(a_type, [&](auto kind) {
            using W = decltype(kind);
            disco_product of = {};
            of.weights = (const char *) a;
            of.n_weights = m;
            of.weights_bytes = a_stride*W::BYTES;
            of.rows = (const char *) b;
            of.n_rows = n;
            of.row_bytes = b_stride*W::ROW_BYTES;
            of.n_blocks = k;
            of.to = (float *) c;
            of.to_stride = c_stride;
            disco_multiply_all<W>(params, of);
        });
    }
#endif
#if defined(__AVX__) && defined(NDEBUG)
    // llamafile's tiles take two rows or more and leave one row to ggml's dot products, which add these types up in another order:
    // a row would have other bits alone than beside others. So one row is computed as two that lie in the same place, in and out.
    const bool is_of_two_orders = a_type == GGML_TYPE_F32 || a_type == GGML_TYPE_F16 || a_type == GGML_TYPE_BF16 || a_type == GGML_TYPE_IQ4_NL;
    if (n == 1 && is_of_two_orders) {
        return disco_other_products(params, m, 2, k, a, a_stride, b, 0, c, 0, a_type, b_type, c_type);
    }
#endif
    return disco_other_products(params, m, n, k, a, a_stride, b, b_stride, c, c_stride, a_type, b_type, c_type);
}

// The engine looks for its number, and the daemon for its name: these products round otherwise than ggml's own. Version 1 was wrong
// with more than one thread where an operation has more than one slice; version 2 added a single row of floats up otherwise than
// several; version 3 had only Q4_1, and Q8_0 where there is VNNI; versions 4 to 8 were slower.
#if defined(DISCO_MULTIPLIES)
DISCO_TOLD(disco_products, 9)
#endif
