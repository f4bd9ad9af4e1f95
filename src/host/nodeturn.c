/* A turn is a bound name in the abstract namespace of Unix sockets, in which nothing is left
 * behind by a process that dies. Who finds the name taken connects to it. Nobody accepts the
 * connection: it breaks when the name's owner closes its socket or dies, which wakes whoever
 * waits. No byte is sent. A name that another user has taken counts as one that cannot be had. A
 * child that is forked during a turn holds it too, until it ends or runs another program. */
#define _GNU_SOURCE
#include "host/nodeturn.h"

#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/arith.h"
#include "base/clock.h"

enum { WAITERS = 128, SHORT_MS = 2, LONG_MS = 1000 };

static int open_socket(void) { return socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); }

static socklen_t address_of(const char *name, struct sockaddr_un *out) {
    *out = (struct sockaddr_un){.sun_family = AF_UNIX}; /* sun_path[0] stays 0: abstract */
    int length = snprintf(out->sun_path + 1, sizeof out->sun_path - 1, "%s-%u", name, (unsigned)geteuid());
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

static int claim(const struct sockaddr_un *address, socklen_t length, bool *out_taken) {
    int fd = open_socket();
    bool ours = fd >= 0 && !bind(fd, (const struct sockaddr *)address, length) && !listen(fd, WAITERS);
    *out_taken = fd >= 0 && !ours && errno == EADDRINUSE;
    if (ours) return fd;
    if (fd >= 0) close(fd);
    return -1;
}

/* Until the owner ends its turn, at most `most_ms`. False: it is another user. */
static bool wait_for_owner(const struct sockaddr_un *address, socklen_t length, int most_ms) {
    struct ucred owner = {0};
    socklen_t size = sizeof owner;
    int fd = open_socket();
    if (fd < 0) return false;
    bool connected = !connect(fd, (const struct sockaddr *)address, length);
    bool known = connected && !getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &owner, &size);
    /* Not connected: it binds the name right now, it has just left, or as many wait as may. */
    struct pollfd end = {.fd = connected ? fd : -1, .events = POLLIN};
    bool same_user = !known || owner.uid == geteuid();
    if (same_user) poll(&end, 1, connected || most_ms < SHORT_MS ? most_ms : SHORT_MS);
    close(fd);
    return same_user;
}

int sthi_node_turn_take(const char *name, int64_t wait_ns) {
    struct sockaddr_un address;
    socklen_t length = address_of(name, &address);
    int64_t end = sthi_now_ns() + wait_ns;
    for (;;) {
        bool taken;
        int turn = claim(&address, length, &taken);
        int64_t left_ms = (end - sthi_now_ns()) / 1000000;
        if (turn >= 0 || !taken || left_ms <= 0) return turn;
        if (!wait_for_owner(&address, length, left_ms < LONG_MS ? (int)left_ms : LONG_MS)) return -1;
    }
}

void sthi_node_turn_end(int turn) {
    if (turn >= 0) close(turn);
}
