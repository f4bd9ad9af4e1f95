/* Folders that hold pages. What is checked is the open folder, so that nobody can exchange it in between. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "telemetry/top.h"

/* The run-time folder of the session, "" where the environment names none. */
static const char *session_folder(void) {
    const char *folder = secure_getenv("XDG_RUNTIME_DIR");
    return folder && *folder == '/' && strlen(folder) < STHI_TOP_PATH / 2 ? folder : "";
}

bool sthi_top_folder(int i, char out[STHI_TOP_PATH]) {
    const char *session = session_folder();
    unsigned user = (unsigned)geteuid();
    if (i == 0) snprintf(out, STHI_TOP_PATH, "%s/stagehand", session);
    else if (i == 1) snprintf(out, STHI_TOP_PATH, "/tmp/stagehand-%u", user);
    else snprintf(out, STHI_TOP_PATH, "/run/user/%u/stagehand", user);
    return i > 0 || *session;
}

int sthi_top_enter(const char *folder, bool make) {
    struct stat st;
    if (make) (void)mkdir(folder, 0700);
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return -1;
    if (fstat(fd, &st) == 0 && st.st_uid == geteuid() && !(st.st_mode & 077)) return fd;
    close(fd);
    return -1;
}
