/* Counts what contexts of the linked implementation write at GMM_LOG_WARN: two contexts, so each line comes twice.
   Arguments: a part of each line that must be there. check.sh links it with builds that lack something. */
#include "gmm.h"

#include <stdio.h>
#include <string.h>

typedef struct lines {
    char text[8][512];
    int count;
} lines;

static void write_line(void *user, gmm_log_level level, const char *message) {
    lines *l = (lines *)user;
    if (level == GMM_LOG_WARN && l->count < 8) (void)snprintf(l->text[l->count++], sizeof l->text[0], "%s", message);
}

int main(int argc, char **argv) {
    gmm_config config = GMM_ZERO;
    lines l = GMM_ZERO;
    config.log.user = &l;
    config.log.level = GMM_LOG_WARN;
    config.log.write = write_line;
    for (int context = 0; context < 2; context++) {
        gmm_context *ctx = NULL;
        if (gmm_create(&ctx, &config, NULL) != GMM_OK) return 1;
        gmm_destroy(ctx);
    }
    for (int i = 0; i < l.count; i++) printf("%s\n", l.text[i]);
    if (l.count != 2 * (argc - 1)) return 1;
    for (int i = 0; i < l.count; i++)
        if (!strstr(l.text[i], argv[1 + i % (argc - 1)])) return 1;
    return 0;
}
