/* ..................................................................... Body: a kernel that another unit defines ... */
#elif GMM__BODY == 0
GMM__ROW_KERNEL GMM__COLUMN(1, GMM__ROW)(const __grid_constant__ GMM__ARGS args);
#undef GMM__ROW

