# Entry of the smallest guest: 64-bit Linux boot protocol, long mode, the first GiB mapped (Documentation/arch/x86/boot.rst).
# Maps 4 GiB in pages of 2 MiB, since the devices of virtio-mmio lie above the third, and calls C.
    .globl _start
    .text
_start:
    cli
    movl $0x400000, %esp
    xorl %ebp, %ebp

    movl $0x600000, %edi            # six pages of tables, cleared
    xorl %eax, %eax
    movl $(6 * 4096 / 8), %ecx
    cld
    rep stosq

    movl $0x601003, 0x600000        # PML4[0]
    movl $0x602003, 0x601000        # PDPT[0..3]
    movl $0x603003, 0x601008
    movl $0x604003, 0x601010
    movl $0x605003, 0x601018

    movl $0x602000, %edi            # 2048 entries of 2 MiB: present, writable, large
    movl $0x83, %eax
    movl $2048, %ecx
1:  movq %rax, (%rdi)
    addq $0x200000, %rax
    addq $8, %rdi
    loop 1b

    movl $0x600000, %eax
    movq %rax, %cr3
    call guest
2:  hlt
    jmp 2b

    .section .note.GNU-stack, "", @progbits
