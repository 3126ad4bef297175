// Prints what a thread of this processor can do at most, as JSON, for limits.py: multiply-adds of bytes and of 32-bit
// floats a second by the widest instruction that it has, cycles a second, and bytes a second from memory while all threads
// read. Seconds are processor time. Argument: the number of threads. Of some rounds the best counts.

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define KEEP(a) __asm__ volatile("" : "+v"(a))
#if defined(__AVX512F__)
typedef __m512 floats;
#define MULTIPLY_ADD_FLOATS(a) a = _mm512_fmadd_ps(xf, yf, a)
#elif defined(__FMA__)
typedef __m256 floats;
#define MULTIPLY_ADD_FLOATS(a) a = _mm256_fmadd_ps(xf, yf, a)
#endif
#if defined(__AVX512VNNI__)
typedef __m512i bytes;
#define MULTIPLY_ADD_BYTES(a) a = _mm512_dpbusd_epi32(a, x, y)
#elif defined(__AVX512BW__)
typedef __m512i bytes;
#define MULTIPLY_ADD_BYTES(a) a = _mm512_add_epi16(a, _mm512_maddubs_epi16(x, y))
#elif defined(__AVXVNNI__)
typedef __m256i bytes;
#define MULTIPLY_ADD_BYTES(a) a = _mm256_dpbusd_avx_epi32(a, x, y)
#elif defined(__AVX2__)
typedef __m256i bytes;
#define MULTIPLY_ADD_BYTES(a) a = _mm256_add_epi16(a, _mm256_maddubs_epi16(x, y))
#endif
#define TURN(a) __asm__ volatile("rorq $1, %0" : "+r"(a)) // one cycle, each after the one before
#elif defined(__aarch64__)
#include <arm_neon.h>
#define KEEP(a) __asm__ volatile("" : "+w"(a))
typedef float32x4_t floats;
#define MULTIPLY_ADD_FLOATS(a) a = vfmaq_f32(a, xf, yf)
#if defined(__ARM_FEATURE_MATMUL_INT8)
typedef int8x16_t bytes;
#define MULTIPLY_ADD_BYTES(a) a = vreinterpretq_s8_s32(vmmlaq_s32(vreinterpretq_s32_s8(a), x, y))
#define BYTES_EACH 2 // each number of the result has two rows' sums
#elif defined(__ARM_FEATURE_DOTPROD)
typedef int8x16_t bytes;
#define MULTIPLY_ADD_BYTES(a) a = vreinterpretq_s8_s32(vdotq_s32(vreinterpretq_s32_s8(a), x, y))
#endif
#define TURN(a) __asm__ volatile("ror %0, %0, #1" : "+r"(a))
#endif
#ifndef BYTES_EACH
#define BYTES_EACH 1
#endif

enum { ROUNDS = 5, TURNS = 2000000 };
static const size_t LEAST = (size_t) 256 << 20; // bytes that a thread reads: more than caches hold

static double processor_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double) t.tv_sec + 1e-9 * (double) t.tv_nsec;
}

// Eight sums at a time, as no instruction's result is there at once; nothing may be left out, nor done beforehand. Each sum
// has a name and a register: what has an address, or is moved about, waits for that.
#define STEP(kind, a, x) KEEP(x); kind(a); KEEP(a)
#define TIMED(type, kind, x, y, found, each)                                                          \
    do {                                                                                              \
        type a = {0}, b = {0}, c = {0}, d = {0}, e = {0}, f = {0}, g = {0}, h = {0};                  \
        for (int round = 0; round < ROUNDS; round++) {                                                \
            const double began = processor_s();                                                       \
            for (int i = 0; i < TURNS; i++) {                                                         \
                STEP(kind, a, x); STEP(kind, b, y); STEP(kind, c, x); STEP(kind, d, y);               \
                STEP(kind, e, x); STEP(kind, f, y); STEP(kind, g, x); STEP(kind, h, y);               \
            }                                                                                         \
            const double rate = (double) TURNS * 8 * (each) / (processor_s() - began);                \
            found = rate > found ? rate : found;                                                      \
        }                                                                                             \
    } while (0)

struct reader {
    pthread_t thread;
    pthread_barrier_t * together;
    double bytes_per_s;
    uint64_t sum;
};

static void * reading(void * argument) {
    struct reader * own = argument;
    uint64_t * numbers = malloc(LEAST);
    if (!numbers) {
        exit(1);
    }
    const size_t n = LEAST / sizeof(*numbers);
    for (size_t i = 0; i < n; i++) {
        numbers[i] = i;
    }
    for (int round = 0; round < ROUNDS; round++) {
        pthread_barrier_wait(own->together);
        const double began = processor_s();
        uint64_t s[8] = {0};
        for (size_t i = 0; i < n; i += 8) {
            for (int j = 0; j < 8; j++) {
                s[j] += numbers[i + j];
            }
        }
        for (int j = 0; j < 8; j++) {
            own->sum += s[j];
        }
        const double rate = (double) LEAST / (processor_s() - began);
        own->bytes_per_s = rate > own->bytes_per_s ? rate : own->bytes_per_s;
    }
    free(numbers);
    return NULL;
}

int main(int n_arguments, char ** arguments) {
    const int n_threads = n_arguments > 1 ? atoi(arguments[1]) : 1;
    double of_bytes = 0, of_floats = 0, cycles = 0, from_memory = 0;
#ifdef MULTIPLY_ADD_BYTES
    bytes x = {0}, y = {0};
    TIMED(bytes, MULTIPLY_ADD_BYTES, x, y, of_bytes, sizeof(bytes) * BYTES_EACH);
#endif
#ifdef MULTIPLY_ADD_FLOATS
    floats xf = {0}, yf = {0};
    TIMED(floats, MULTIPLY_ADD_FLOATS, xf, yf, of_floats, sizeof(floats) / sizeof(float));
#endif
#ifdef TURN
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t a = 1;
        const double began = processor_s();
        for (int i = 0; i < TURNS; i++) {
            TURN(a); TURN(a); TURN(a); TURN(a); TURN(a); TURN(a); TURN(a); TURN(a);
        }
        const double rate = 8.0 * TURNS / (processor_s() - began);
        cycles = rate > cycles ? rate : cycles;
    }
#endif
    struct reader * readers = calloc((size_t) n_threads, sizeof(*readers));
    pthread_barrier_t together;
    if (n_threads < 1 || !readers || pthread_barrier_init(&together, NULL, (unsigned) n_threads)) {
        return 1;
    }
    for (int i = 0; i < n_threads; i++) {
        readers[i].together = &together;
        if (pthread_create(&readers[i].thread, NULL, reading, &readers[i])) {
            return 1;
        }
    }
    uint64_t sum = 0;
    for (int i = 0; i < n_threads; i++) {
        pthread_join(readers[i].thread, NULL);
        from_memory += readers[i].bytes_per_s / n_threads;
        sum += readers[i].sum;
    }
    printf("{\"multiply_adds_per_s\": %.6g, \"float_multiply_adds_per_s\": %.6g, \"cycles_per_s\": %.6g, "
           "\"bytes_per_s\": %.6g}\n", of_bytes, of_floats, cycles, from_memory);
    return sum == 12345;
}
