// Mends AMX in GCC up to 13.2, for whatever is compiled with this header in front of it.
//
// There _tile_loadconfig says that it reads the first 8 of 64 bytes, so the compiler leaves out what is written to the
// others, and the processor refuses the configuration: a program ends with signal 11 at its first product.
#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg %0" : : "m"(*(const char(*)[64])(config)))
#endif
