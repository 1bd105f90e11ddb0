/* case_ids.h - lists of case ids, written with braces as a shell's: linear.{fwd,dgrad}.bf16 stands for two ids. An
 * empty alternative takes the dot in front of it along. */
#ifndef GMM_TOOLS_CASE_IDS_H
#define GMM_TOOLS_CASE_IDS_H

typedef struct case_ids { char **id; int count, capacity; } case_ids;

/* Adds the ids of `pattern`. Ends the program if memory is exhausted. */
void case_ids_expand(case_ids *list, const char *pattern);
void case_ids_free(case_ids *list);

#endif
