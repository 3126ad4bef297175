// Included before each file of ggml-cpu's matrix tiles where GCC is one whose _tile_loadconfig tells the compiler of the
// first 8 of the 64 bytes that it reads (GCC bug 114098; mended in 11.5, 12.4, 13.3 and 14): the other stores into a
// configuration are left out then, and ldtilecfg faults.
#pragma once
#include <immintrin.h>

struct disco_tile_configuration {
    unsigned char bytes[64];
};

#define _tile_loadconfig(from) \
    __asm__ volatile("ldtilecfg\t%X0" ::"m"(*((const struct disco_tile_configuration *)(from))))
