// Prints how long llama.cpp's dot products of quantised weights take on this processor, in fs a weight: of each kind the
// least of some rounds, and of all kinds the geometric mean. Compiled with one of its files (arch/x86/quants.c), in
// different ways, to choose among them.

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

typedef void dot(int n, float * sum, size_t bs, const void * x, size_t bx, const void * y, size_t by, int n_rows);
dot ggml_vec_dot_q4_0_q8_0, ggml_vec_dot_q4_1_q8_1, ggml_vec_dot_q8_0_q8_0, ggml_vec_dot_q4_K_q8_K, ggml_vec_dot_q6_K_q8_K;

// What that file wants of others, and does not use here.
float ggml_table_f32_f16[1 << 16], ggml_table_f32_e8m0_half[1 << 8], ggml_table_f32_ue4m3[1 << 8];
void quantize_row_q8_K_ref(const float * x, void * y, int64_t n) { (void) x; (void) y; (void) n; abort(); }

enum { N = 1536, ROWS = 64, ROUNDS = 30, MOST_BYTES = 2 }; // of a weight, more than any kind has

static double now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e9 * (double) t.tv_sec + (double) t.tv_nsec;
}

int main(void) {
    dot * const kinds[] = {
        ggml_vec_dot_q4_0_q8_0, ggml_vec_dot_q4_1_q8_1, ggml_vec_dot_q8_0_q8_0, ggml_vec_dot_q4_K_q8_K,
        ggml_vec_dot_q6_K_q8_K,
    };
    const int n_kinds = sizeof(kinds) / sizeof(kinds[0]);
    static uint8_t rows[ROWS][N * MOST_BYTES], x[N * MOST_BYTES];
    // Bytes below 0x20: of two such each 16-bit number is small and finite, whatever is a scale.
    for (size_t i = 0; i < sizeof(rows); i++) {
        ((uint8_t *) rows)[i] = (uint8_t) (i * 7 % 31);
    }
    for (size_t i = 0; i < sizeof(x); i++) {
        x[i] = (uint8_t) (i * 11 % 31);
    }
    double product = 0;
    float sink = 0;
    for (int kind = 0; kind < n_kinds; kind++) {
        double least = INFINITY;
        for (int round = 0; round < ROUNDS; round++) {
            const double began = now_ns();
            for (int row = 0; row < ROWS; row++) {
                float sum;
                kinds[kind](N, &sum, 0, rows[row], 0, x, 0, 1);
                sink += sum;
            }
            least = fmin(least, now_ns() - began);
        }
        product += log(least / ((double) N * ROWS));
    }
    printf("%.0f\n", 1e6 * exp(product / n_kinds)); // femtoseconds: CMake reckons with whole numbers
    return sink == 12345.0f;
}
