/* What the launcher carries: program.bin as binary/pack.py writes it, and the default model as it is. */
#ifdef __APPLE__
#define NAME(x) _##x
	.section __TEXT,__const
#else
#define NAME(x) x
	.section .rodata
#endif

	.balign 64
	.globl NAME(disco_program)
NAME(disco_program):
	.incbin "program.bin"
	.globl NAME(disco_program_end)
NAME(disco_program_end):

	.balign 64
	.globl NAME(disco_model)
NAME(disco_model):
	.incbin "model.bin"
	.globl NAME(disco_model_end)
NAME(disco_model_end):
	.byte 0

#ifdef __linux__
	.section .note.GNU-stack,"",%progbits
#endif
