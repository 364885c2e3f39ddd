/* The smallest guest that can be asked something: a vsock echo without interrupts, floating point or memory of its own.
 *
 * It stands in for a real guest where the host's KVM boots no stock kernel: everything of the host side (API, jailer,
 * snapshot, restore, vsock, lease, kill) can be tested with it, up to a run of a Gate.
 *
 * Port 52 greets its first connection with a line and closes it, as the agent does before a snapshot. On the next it
 * plays the agent: it takes the lease and the code, runs nothing, makes one call of the broker on port 53 and gives
 * back the first bytes of the lease's entropy as the value.
 * Port 54 answers each payload with 'E' and the payload. Port 55 does too, and first sends one letter that counts up in
 * memory: after a restore it goes on where the snapshot was taken, so that a test can tell a restored guest from one
 * that was booted again.
 *
 * Sources: virtio 1.2, 4.2 (MMIO), 2.7 (split queues), 5.10 (socket device).
 */
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

enum { QUEUE = 16, BUFFERS = 8, PAYLOAD = 4096, MOST = 4000, HEADER = 44 };
enum { NEXT = 1, WRITE = 2 };
enum { REQUEST = 1, RESPONSE = 2, RST = 3, SHUTDOWN = 4, RW = 5, CREDIT_UPDATE = 6, CREDIT_REQUEST = 7 };
enum { MAGIC = 0x74726976, SOCKET_DEVICE = 19, HOST = 2, CONNECTIONS = 8 };
enum { CONTROL_PORT = 52, CALL_PORT = 53, ECHO_PORT = 54, COUNT_PORT = 55 };
enum { LEASE = 80, ENTROPY_AT = 16, BOUNDS_AT = 12, CODE = 12, SOURCE_AT = 4 };

struct desc { u64 addr; u32 len; u16 flags, next; };
struct avail { u16 flags, idx, ring[QUEUE]; };
struct used_elem { u32 id, len; };
struct used { u16 flags, idx; struct used_elem ring[QUEUE]; };
struct header {
    u64 src_cid, dst_cid;
    u32 src_port, dst_port, len;
    u16 type, op;
    u32 flags, buf_alloc, fwd_cnt;
} __attribute__((packed));
struct queue {
    struct desc desc[QUEUE] __attribute__((aligned(16)));
    struct avail avail __attribute__((aligned(4)));
    struct used used __attribute__((aligned(4)));
    u16 seen;
};
struct connection { u32 host_port, own_port, fwd; };

static struct queue queues[3] __attribute__((aligned(4096)));
static struct header rx_header[BUFFERS], tx_header[BUFFERS];
static u8 rx_data[BUFFERS][PAYLOAD], tx_data[BUFFERS][PAYLOAD];
static struct connection connections[CONNECTIONS];
static volatile u8 *device;
static u64 own_cid;
static u16 in_flight, next_tx;
static u8 letter, greeted;
static struct connection *control, *call;
static u8 said[1 << 16], entropy[4];
static u32 have, stage;

static void say(const char *text)
{
    for (; *text; text++)
        __asm__ volatile("outb %0, %1" : : "a"(*text), "Nd"((u16)0x3f8));
}

static void stop(void)
{
    say("STOPPED\n");
    for (;;)
        __asm__ volatile("hlt");
}

static u32 get(u32 at) { return *(volatile u32 *)(device + at); }
static void put(u32 at, u32 value) { *(volatile u32 *)(device + at) = value; }
static void barrier(void) { __asm__ volatile("mfence" : : : "memory"); }

static void copy(void *to, const void *from, u32 len)
{
    for (u32 i = 0; i < len; i++)
        ((volatile u8 *)to)[i] = ((const u8 *)from)[i];
}

static u8 *find(u64 from)
{
    for (u64 at = from; at < from + 0x10000; at += 0x1000) {
        volatile u32 *one = (volatile u32 *)at;
        if (one[0] == MAGIC && one[2] == SOCKET_DEVICE)
            return (u8 *)at;
    }
    return 0;
}

static void offer(u16 chain)
{
    struct queue *rx = &queues[0];
    rx->avail.ring[rx->avail.idx % QUEUE] = chain * 2;
    barrier();
    rx->avail.idx++;
    barrier();
}

static void init(void)
{
    put(0x70, 0);
    put(0x70, 1);
    put(0x70, 3);
    put(0x24, 0);
    put(0x20, 0);
    put(0x24, 1);
    put(0x20, 1); /* VIRTIO_F_VERSION_1 */
    put(0x70, 11);
    if (!(get(0x70) & 8))
        stop();
    own_cid = *(volatile u32 *)(device + 0x100);
    for (u32 i = 0; i < 3; i++) {
        struct queue *q = &queues[i];
        put(0x30, i);
        put(0x38, QUEUE);
        put(0x80, (u32)(u64)q->desc);
        put(0x84, 0);
        put(0x90, (u32)(u64)&q->avail);
        put(0x94, 0);
        put(0xa0, (u32)(u64)&q->used);
        put(0xa4, 0);
        put(0x44, 1);
    }
    for (u16 i = 0; i < BUFFERS; i++) {
        queues[0].desc[i * 2] = (struct desc){(u64)&rx_header[i], HEADER, NEXT | WRITE, i * 2 + 1};
        queues[0].desc[i * 2 + 1] = (struct desc){(u64)rx_data[i], PAYLOAD, WRITE, 0};
        offer(i);
    }
    put(0x70, 15);
    put(0x50, 0);
}

static void collect(void)
{
    struct queue *tx = &queues[1];
    barrier();
    while (tx->seen != *(volatile u16 *)&tx->used.idx) {
        tx->seen++;
        in_flight--;
    }
}

static void send(const struct connection *to, u16 op, const u8 *data, u32 len)
{
    const u32 both = 3; /* of a shutdown: no more is sent, no more is taken */
    struct queue *tx = &queues[1];
    while (in_flight >= BUFFERS)
        collect();
    u16 slot = next_tx++ % BUFFERS;
    copy(tx_data[slot], data, len);
    tx_header[slot] = (struct header){own_cid, HOST, to->own_port, to->host_port, len, 1, op, op == SHUTDOWN ? both : 0, 65536, to->fwd};
    tx->desc[slot * 2] = (struct desc){(u64)&tx_header[slot], HEADER, len ? NEXT : 0, slot * 2 + 1};
    tx->desc[slot * 2 + 1] = (struct desc){(u64)tx_data[slot], len, 0, 0};
    tx->avail.ring[tx->avail.idx % QUEUE] = slot * 2;
    barrier();
    tx->avail.idx++;
    barrier();
    in_flight++;
    put(0x50, 1);
}

static struct connection *lookup(u32 host_port, u32 own_port)
{
    for (u32 i = 0; i < CONNECTIONS; i++)
        if (connections[i].host_port == host_port && connections[i].own_port == own_port)
            return &connections[i];
    return 0;
}

static u32 be32(const u8 *at) { return (u32)at[0] << 24 | (u32)at[1] << 16 | (u32)at[2] << 8 | at[3]; }

static u32 text(u8 *to, const char *from)
{
    u32 len = 0;
    for (; from[len]; len++)
        to[len] = from[len];
    return len;
}

static void sized(u8 *to, u32 len)
{
    for (u32 i = 0; i < 4; i++)
        to[i] = len >> (24 - 8 * i);
}

/* One frame of the worker: 'c', the length, the bytes. */
static void worker(u8 *frame, u32 len)
{
    frame[0] = 'c';
    sized(frame + 1, len);
    send(control, RW, frame, len + 5);
}

static void result(void)
{
    static u8 frame[256];
    u8 *json = frame + 9;
    u32 len = text(json, "{\"value\":\"");
    for (u32 i = 0; i < 8; i++)
        json[len++] = "0123456789abcdef"[entropy[i / 2] >> (i % 2 ? 0 : 4) & 15];
    len += text(json + len, "\",\"text\":\"\",\"error\":null,\"exit_code\":0,\"truncated\":{}}");
    sized(frame + 5, len);
    worker(frame, len + 4);
    stage = 4;
}

static void take(u32 len)
{
    have -= len;
    for (u32 i = 0; i < have; i++)
        said[i] = said[i + len];
}

/* What the host says on the control port: the lease and its bounds, the header and the source, then one byte to go. */
static void agent(const u8 *data, u32 len)
{
    static u8 ready[64], request[128];
    if (have + len > sizeof said)
        stop();
    copy(said + have, data, len);
    have += len;
    if (stage == 0 && have >= LEASE && have >= LEASE + be32(said + BOUNDS_AT)) {
        copy(entropy, said + ENTROPY_AT, sizeof entropy);
        take(LEASE + be32(said + BOUNDS_AT));
        worker(ready, text(ready + 5, "R{\"memory\":\"machine\"}\n"));
        stage = 1;
    }
    if (stage == 1 && have >= CODE && have >= CODE + be32(said + SOURCE_AT)) {
        take(CODE + be32(said + SOURCE_AT));
        stage = 2;
    }
    if (stage == 2 && have >= 1) {
        stage = 3;
        if (!call) {
            result();
            return;
        }
        u32 size = text(request + 4, "{\"id\":1,\"op\":\"echo\",\"args\":{\"text\":\"from the guest\"}}");
        sized(request, size);
        send(call, RW, request, size + 4);
    }
}

static void receive(const struct header *h, const u8 *data)
{
    struct connection stranger = {h->src_port, h->dst_port, 0};
    struct connection *c = lookup(h->src_port, h->dst_port);
    static u8 answer[PAYLOAD];
    if (h->op == REQUEST) {
        c = lookup(0, 0);
        if (!c || h->dst_port < CONTROL_PORT || h->dst_port > COUNT_PORT) {
            send(&stranger, RST, 0, 0);
            return;
        }
        *c = stranger;
        send(c, RESPONSE, 0, 0);
        if (c->own_port == CONTROL_PORT && !greeted) {
            greeted = 1;
            send(c, RW, (const u8 *)"R{}\n", 4);
            send(c, SHUTDOWN, 0, 0);
        } else if (c->own_port == CONTROL_PORT) {
            control = c;
        } else if (c->own_port == CALL_PORT) {
            call = c;
        }
        if (c->own_port == COUNT_PORT) {
            answer[0] = 'A' + letter++ % 26;
            send(c, RW, answer, 1);
        }
    } else if (!c) {
        if (h->op != RST)
            send(&stranger, RST, 0, 0);
    } else if (h->op == RW) {
        u32 len = h->len < MOST ? h->len : MOST;
        c->fwd += h->len;
        if (c == control) {
            agent(data, h->len);
            return;
        }
        if (c == call) {
            if (stage == 3)
                result();
            return;
        }
        answer[0] = 'E';
        copy(answer + 1, data, len);
        send(c, RW, answer, len + 1);
    } else if (h->op == CREDIT_REQUEST) {
        send(c, CREDIT_UPDATE, 0, 0);
    } else if (h->op == SHUTDOWN || h->op == RST) {
        if (h->op == SHUTDOWN)
            send(c, RST, 0, 0);
        control = control == c ? 0 : control;
        call = call == c ? 0 : call;
        *c = (struct connection){0, 0, 0};
    }
}

void guest(void)
{
    struct queue *rx = &queues[0];
    device = find(0xd0000000);
    if (!device)
        device = find(0xc0000000);
    if (!device)
        stop();
    init();
    say("LISTENING\n");
    for (;;) {
        barrier();
        if (rx->seen == *(volatile u16 *)&rx->used.idx) {
            __asm__ volatile("pause");
            continue;
        }
        u16 chain = (u16)rx->used.ring[rx->seen++ % QUEUE].id / 2;
        receive(&rx_header[chain], rx_data[chain]);
        offer(chain);
        put(0x50, 0);
    }
}
