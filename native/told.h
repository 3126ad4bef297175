#pragma once

// A number that the engine finds by its name.
#if defined(_WIN32)
#define DISCO_TOLD(name, number) extern "C" __declspec(dllexport) const int name; const int name = number;
#else
#define DISCO_TOLD(name, number) extern "C" __attribute__((visibility("default"))) const int name; const int name = number;
#endif
